"""Payloads as bytes inside the messages of the control stream: works wherever it does.

The blocks are gathered straight into the message, which gRPC sends as it is.
"""

import asyncio

import torch

from baton.engine.transfer.base import BlockReader, Shipment, TransportFailed
from baton.engine.transfer.offload import copying
from baton.engine.transfer.plan import RAW, FramePlan
from baton.engine.transfer.wire import work
from baton.worker import kv_wire


class InlineLink:
    """To one receiver. Frames take room until they are acknowledged: at most `pair_frames` of all
    hand-offs to it, so that a slow one leaves others their share of `in_flight`, the process's."""

    name = "grpc"
    frame_bytes = 8 << 20
    depth = 3
    owns_payloads = True

    def __init__(self, in_flight: asyncio.Semaphore, pair_frames: int, timeout_s: float) -> None:
        self._in_flight = in_flight
        self._of_pair = asyncio.Semaphore(pair_frames)
        self._timeout_s = timeout_s

    async def load(self, reader: BlockReader, plan: FramePlan, sequence: int) -> Shipment:
        await self._acquire()
        try:
            size = reader.num_bytes(plan)
            # Made on the event loop, filled in a thread: memory of many threads' own heaps adds up.
            frame = kv_wire.PayloadFrame(sequence, plan, size, reader.checksums)
            message = await copying(work(size, plan.codec == RAW), _fill, frame, reader, plan)
        except BaseException:
            self._release()
            raise
        return Shipment(message, release=self._release)

    async def _acquire(self) -> None:
        """Raises TransportFailed."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._of_pair.acquire()
                try:
                    await self._in_flight.acquire()
                except BaseException:
                    self._of_pair.release()
                    raise
        except TimeoutError:
            raise TransportFailed(f"no room in flight for {self._timeout_s} s") from None

    def _release(self) -> None:
        self._in_flight.release()
        self._of_pair.release()


def _fill(frame: kv_wire.PayloadFrame, reader: BlockReader, plan: FramePlan) -> bytes:
    return frame.message(reader.read(plan, torch.frombuffer(frame.payload, dtype=torch.uint8)))
