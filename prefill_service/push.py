"""A `KVSender` over one KVTransfer.Push call: what is said, in order, whatever carries the bytes.

At most `link.depth` frames are unacknowledged, so a slow decode slows prefill. When decode
cannot read a payload where it should be, that frame and all later ones go again by the pair's
next transport. The commit leaves after every frame is acknowledged: a slot or buffer is never
written again while a hand-off that still reads it can be committed.
"""

import asyncio
import contextlib
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import NoReturn, Protocol

import grpc

from baton.engine.kv_layout import KVLayout
from baton.engine.transfer.base import (
    BlockReader,
    FirstToken,
    HandoffDamaged,
    HandoffError,
    HandoffLost,
    HandoffRefused,
    PayloadLink,
    Shipment,
    TransportFailed,
)
from baton.engine.transfer.plan import DEFAULT_FRAME_BYTES, FramePlan
from baton.v1 import common_pb2, kv_pb2
from baton.worker import kv_wire
from baton.worker.translate import first_token_to_pb, layout_to_pb

_ERRORS: dict[grpc.StatusCode, type[HandoffError]] = {
    grpc.StatusCode.FAILED_PRECONDITION: HandoffRefused,
    grpc.StatusCode.DATA_LOSS: HandoffDamaged,
}


class Links(Protocol):
    """The transports of a pair of workers."""

    async def best(self) -> PayloadLink: ...

    def failed(self, link: PayloadLink, reason: str) -> None:
        """It rests for a while; `best` gives another one."""

    def abandoned(self, link: PayloadLink) -> None:
        """A hand-off has ended with payloads that nobody may ever read."""


@dataclass
class _Frame:
    sequence: int
    plan: FramePlan
    num_bytes: int
    shipment: Shipment | None = None
    delivery: "asyncio.Task[None] | None" = None

    def release(self) -> None:
        if self.shipment is not None:
            self.shipment.release()
            self.shipment = None


class PushSender:
    """Opens the call with the first frame; `abort` cancels it."""

    frame_bytes = DEFAULT_FRAME_BYTES

    def __init__(
        self,
        channel: grpc.aio.Channel,
        destination: common_pb2.Reservation,
        layout: KVLayout,
        reader: BlockReader,
        links: Links,
        timeout_s: float,
    ) -> None:
        self.num_frames = 0
        self.bytes_sent = 0
        self.transport = ""
        self._push = channel.stream_stream(
            "/baton.v1.KVTransfer/Push", kv_wire.serialize, kv_pb2.KVAck.FromString
        )
        self._destination = destination
        self._layout = layout
        self._reader = reader
        self._links = links
        self._timeout_s = timeout_s
        self._call: grpc.aio.StreamStreamCall | None = None
        self._link: PayloadLink | None = None
        self._frames: dict[int, _Frame] = {}
        self._next = 0
        """Frame to write next; smaller than `num_frames` after a transport has failed."""
        self._writing: asyncio.Task[None] | None = None
        self._committed = False
        self._heard = asyncio.Event()
        self._listening: asyncio.Task[None] | None = None

    async def send(self, plan: FramePlan) -> None:
        num_bytes = self._reader.num_bytes(plan)
        self._frames[self.num_frames] = _Frame(self.num_frames, plan, num_bytes)
        self.num_frames += 1
        self.bytes_sent += num_bytes
        await self._ship()

    async def commit(self, first_tokens: tuple[FirstToken, ...]) -> None:
        call = await self._open()
        await self._ship(everything=True)
        message = kv_pb2.KVCommit(
            num_frames=self.num_frames,
            first_tokens=[first_token_to_pb(first) for first in first_tokens],
        )
        await self._written(call)
        await self._in_time(call.write(kv_pb2.KVFrame(commit=message)), call)
        await self._in_time(call.done_writing(), call)
        while not self._committed:
            await self._wait_heard(call)

    async def abort(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
        if self._call is not None:
            self._call.cancel()
        undelivered = any(f.delivery and not f.delivery.done() for f in self._frames.values())
        if self._link is not None and undelivered:
            self._links.abandoned(self._link)
        for frame in self._frames.values():
            frame.release()
        self._frames.clear()

    async def _ship(self, everything: bool = False) -> None:
        """Writes what is due; then waits for room, or until everything is acknowledged."""
        call = await self._open()
        while True:
            link = await self._best_link()
            unacknowledged = sum(number < self._next for number in self._frames)
            if self._next < self.num_frames and unacknowledged < link.depth:
                await self._ship_one(self._frames[self._next], link, call)
            elif self._frames and (everything or self._next < self.num_frames):
                await self._wait_heard(call)
            else:
                return

    async def _ship_one(
        self, frame: _Frame, link: PayloadLink, call: grpc.aio.StreamStreamCall
    ) -> None:
        try:
            frame.shipment = shipment = await link.load(self._reader, frame.plan)
        except TransportFailed as failure:
            self._fail_link(str(failure))
            return
        if self._next != frame.sequence or link is not self._link:
            frame.release()  # the link failed meanwhile: another frame is next
            return
        wire = await self._message(frame, shipment)
        await self._written(call)  # the frame before; this one is written while the next is loaded
        if self._next != frame.sequence or link is not self._link:
            frame.release()
            return
        self._next += 1
        self.transport = link.name
        self._writing = asyncio.create_task(call.write(wire))
        frame.delivery = asyncio.create_task(_deliver(self._writing, shipment))

    async def _written(self, call: grpc.aio.StreamStreamCall) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await self._in_time(asyncio.shield(writing), call)

    async def _message(self, frame: _Frame, shipment: Shipment) -> kv_pb2.KVFrame | bytes:
        arguments = (frame.sequence, frame.plan, shipment.carrier, shipment.checksum)
        if isinstance(shipment.carrier, memoryview):
            return await asyncio.to_thread(kv_wire.data_frame, *arguments)
        return kv_wire.data_frame(*arguments)

    async def _best_link(self) -> PayloadLink:
        if self._link is None:
            self._link = await self._links.best()
        return self._link

    def _fail_link(self, reason: str) -> None:
        if self._link is not None:
            self._links.failed(self._link, reason)
            self._link = None

    async def _open(self) -> grpc.aio.StreamStreamCall:
        if self._call is None:
            call = self._call = self._push()
            self._listening = asyncio.create_task(self._listen(call))
            opening = kv_pb2.KVOpen(
                reservation_id=self._destination.id,
                generation=self._destination.generation,
                incarnation=self._destination.incarnation,
                layout=layout_to_pb(self._layout),
            )
            await self._in_time(call.write(kv_pb2.KVFrame(open=opening)), call)
        return self._call

    async def _listen(self, call: grpc.aio.StreamStreamCall) -> None:
        try:
            async for ack in call:
                self._hear(ack)
        except grpc.aio.AioRpcError:
            return  # whoever waits asks the call for its status
        finally:
            self._heard.set()

    def _hear(self, ack: kv_pb2.KVAck) -> None:
        for number in [number for number in self._frames if number < ack.frames]:
            self._frames.pop(number).release()
        if ack.unreadable:
            self._fail_link(ack.unreadable)
            self._next = ack.frames
            for frame in self._frames.values():
                frame.release()
        self._committed = ack.committed
        self._heard.set()

    async def _wait_heard(self, call: grpc.aio.StreamStreamCall) -> None:
        await self._in_time(self._heard.wait(), call)
        self._heard.clear()
        if call.done() and not self._committed:
            await self._raise_status(call)

    async def _in_time(self, step: Awaitable[object], call: grpc.aio.StreamStreamCall) -> None:
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

    async def _raise_status(self, call: grpc.aio.StreamStreamCall) -> NoReturn:
        code, details = await call.code(), await call.details()
        raise _ERRORS.get(code, HandoffLost)(f"{self._destination.address}: {details or code.name}")


async def _deliver(writing: "asyncio.Task[None]", shipment: Shipment) -> None:
    """Once the header is written. A failure is told to the sender by the call or by decode."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TransportFailed):
        await asyncio.shield(writing)
        await shipment.deliver()
