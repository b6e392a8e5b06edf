"""Payloads as bytes inside the messages of the control stream: works wherever it does."""

import asyncio

import torch

from baton.engine.transfer.base import BlockReader, Shipment, TransportFailed
from baton.engine.transfer.plan import DEFAULT_FRAME_BYTES, FramePlan


class InlineLink:
    """`in_flight` bounds the payloads of all hand-offs of the process."""

    name = "grpc"
    frame_bytes = DEFAULT_FRAME_BYTES
    depth = 3

    def __init__(self, in_flight: asyncio.Semaphore, timeout_s: float) -> None:
        self._in_flight = in_flight
        self._timeout_s = timeout_s

    async def load(self, reader: BlockReader, plan: FramePlan) -> Shipment:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._in_flight.acquire()
        except TimeoutError:
            raise TransportFailed(f"no room in flight for {self._timeout_s} s") from None
        try:
            payload = torch.empty(reader.num_bytes(plan), dtype=torch.uint8)
            checksum = await asyncio.to_thread(reader.read, plan, payload)
        except BaseException:
            self._in_flight.release()
            raise
        view = memoryview(payload.numpy())  # type: ignore[arg-type]
        return Shipment(view, checksum, self._in_flight.release)
