"""A `KVSender` over one KVTransfer.Push call. HTTP/2 flow control is the back-pressure.

Every wait has the same deadline: a decode worker that takes no frame for that long is lost.
"""

import asyncio
from collections.abc import Awaitable
from typing import NoReturn

import grpc

from baton.engine.kv_layout import KVLayout
from baton.engine.transfer.base import (
    Commit,
    HandoffDamaged,
    HandoffError,
    HandoffLost,
    HandoffRefused,
    KVFrame,
)
from baton.v1 import common_pb2, kv_pb2, kv_pb2_grpc
from baton.worker.translate import first_token_to_pb, layout_to_pb

_ERRORS: dict[grpc.StatusCode, type[HandoffError]] = {
    grpc.StatusCode.FAILED_PRECONDITION: HandoffRefused,
    grpc.StatusCode.DATA_LOSS: HandoffDamaged,
}


class GrpcSender:
    """Opens the call with the first frame; `abort` cancels it."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        destination: common_pb2.Reservation,
        layout: KVLayout,
        timeout_s: float,
    ) -> None:
        self._stub = kv_pb2_grpc.KVTransferStub(channel)
        self._destination = destination
        self._layout = layout
        self._timeout_s = timeout_s
        self._call: grpc.aio.StreamUnaryCall | None = None

    async def send(self, frame: KVFrame) -> None:
        data = kv_pb2.KVData(
            sequence=frame.sequence,
            layer_start=frame.layer_start,
            layer_count=frame.layer_count,
            blocks=frame.positions,
            payload=bytes(frame.payload),
            checksum=frame.checksum,
        )
        await self._write(kv_pb2.KVFrame(data=data))

    async def commit(self, commit: Commit) -> None:
        message = kv_pb2.KVCommit(
            num_frames=commit.num_frames,
            first_tokens=[first_token_to_pb(first) for first in commit.first_tokens],
        )
        await self._write(kv_pb2.KVFrame(commit=message))
        call = await self._open()
        await self._in_time(call.done_writing(), call)
        await self._in_time(call, call)

    async def abort(self) -> None:
        if self._call is not None:
            self._call.cancel()

    async def _open(self) -> grpc.aio.StreamUnaryCall:
        if self._call is None:
            call = self._call = self._stub.Push()
            opening = kv_pb2.KVOpen(
                reservation_id=self._destination.id,
                generation=self._destination.generation,
                incarnation=self._destination.incarnation,
                layout=layout_to_pb(self._layout),
            )
            await self._in_time(call.write(kv_pb2.KVFrame(open=opening)), call)
        return self._call

    async def _write(self, frame: kv_pb2.KVFrame) -> None:
        call = await self._open()
        await self._in_time(call.write(frame), call)

    async def _in_time(self, step: Awaitable[object], call: grpc.aio.StreamUnaryCall) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await step
        except TimeoutError:
            raise HandoffLost(
                f"decode at {self._destination.address} took nothing for {self._timeout_s} s"
            ) from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # A write on a call that has ended says only that; the call's status says why.
            await self._raise_status(call)

    async def _raise_status(self, call: grpc.aio.StreamUnaryCall) -> NoReturn:
        code, details = await call.code(), await call.details()
        raise _ERRORS.get(code, HandoffLost)(f"{self._destination.address}: {details or code.name}")
