"""The receiving half of one KVTransfer.Push: reads ahead, applies in order, acknowledges.

While one frame is copied into blocks the next ones arrive, at most `_READ_AHEAD`. When a
payload is not where its header says, the sender is told, and everything from that frame on is
dropped until it comes again.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from baton.engine.transfer.base import (
    Carrier,
    Commit,
    HandoffDamaged,
    HandoffError,
    KVFrame,
    ShmSlot,
    TorchMessage,
    TransportFailed,
)
from baton.v1 import kv_pb2
from baton.worker.kv_wire import WireFrame
from baton.worker.translate import first_token_from_pb
from decode_service.inbox import Arrival, Inbox
from decode_service.incoming import IncomingHandoff

_READ_AHEAD = 3


@dataclass
class _Incoming:
    data: kv_pb2.KVData
    arrival: "asyncio.Task[Arrival]"

    def forget(self) -> None:
        """Gives its buffer back whenever it arrives."""
        self.arrival.add_done_callback(_release)


def _release(arrival: "asyncio.Task[Arrival]") -> None:
    if not arrival.cancelled() and arrival.exception() is None:
        arrival.result().release()


class FrameReader:
    """Frames in order; `timeout_s`: a sender that is silent for longer has lost its hand-off."""

    def __init__(self, frames: AsyncIterator[WireFrame], timeout_s: float) -> None:
        self._frames = frames
        self._timeout_s = timeout_s

    async def next(self) -> WireFrame:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await anext(self._frames)
        except StopAsyncIteration:
            raise HandoffDamaged("the sender ended before its commit") from None
        except TimeoutError:
            raise HandoffDamaged(f"the sender was silent for {self._timeout_s} s") from None


class Receiving:
    def __init__(
        self,
        handoff: IncomingHandoff,
        inbox: Inbox,
        reader: FrameReader,
        acknowledge: Callable[[kv_pb2.KVAck], Awaitable[None]],
    ) -> None:
        self._handoff = handoff
        self._inbox = inbox
        self._reader = reader
        self._acknowledge = acknowledge
        self._queue: asyncio.Queue[_Incoming | kv_pb2.KVCommit | HandoffError] = asyncio.Queue(
            _READ_AHEAD
        )
        self._dropping = False

    async def run(self) -> None:
        """Until the commit is applied. Raises HandoffError."""
        reading = asyncio.create_task(self._read())
        try:
            while not isinstance(item := await self._queue.get(), kv_pb2.KVCommit):
                if isinstance(item, HandoffError):
                    raise item
                await self._take(item)
            await self._handoff.commit(_commit_from_pb(item))
        finally:
            reading.cancel()
            # Not awaited: a second cancellation could get in between.
            reading.add_done_callback(lambda _: self._forget_rest())

    async def _read(self) -> None:
        try:
            while (frame := await self._reader.next()).message.WhichOneof("frame") == "data":
                fetch = self._inbox.fetch(_carrier(frame))
                incoming = _Incoming(frame.message.data, asyncio.ensure_future(fetch))
                try:
                    await self._queue.put(incoming)
                except asyncio.CancelledError:
                    incoming.forget()
                    raise
            if frame.message.WhichOneof("frame") != "commit":
                raise HandoffDamaged("a second opening frame came before the commit")
            await self._queue.put(frame.message.commit)
        except HandoffError as error:
            await self._queue.put(error)

    async def _take(self, incoming: _Incoming) -> None:
        sequence, expected = incoming.data.sequence, self._handoff.num_frames
        if self._dropping and sequence > expected:
            incoming.forget()
            return
        self._dropping = False
        try:
            arrival = await asyncio.shield(incoming.arrival)
        except TransportFailed as error:
            self._dropping = True
            await self._acknowledge(kv_pb2.KVAck(frames=expected, unreadable=str(error)))
            return
        except asyncio.CancelledError:
            incoming.forget()
            raise
        try:
            await self._handoff.receive(_frame_from_pb(incoming.data, arrival))
        finally:
            arrival.release()
        await self._acknowledge(kv_pb2.KVAck(frames=self._handoff.num_frames))

    def _forget_rest(self) -> None:
        while not self._queue.empty():
            item = self._queue.get_nowait()
            if isinstance(item, _Incoming):
                item.forget()


def _carrier(frame: WireFrame) -> Carrier:
    data = frame.message.data
    if data.HasField("shm"):
        slot = data.shm
        return ShmSlot(slot.pid, slot.fd, slot.token, slot.offset, slot.size)
    if data.HasField("torch"):
        return TorchMessage(data.torch.group, data.torch.tag, data.torch.size)
    return data.payload if frame.payload is None else frame.payload


def _frame_from_pb(data: kv_pb2.KVData, arrival: Arrival) -> KVFrame:
    return KVFrame(
        data.sequence,
        data.layer_start,
        data.layer_count,
        tuple(data.blocks),
        arrival.payload,
        data.checksum if data.HasField("checksum") else None,
    )


def _commit_from_pb(commit: kv_pb2.KVCommit) -> Commit:
    firsts = tuple(first_token_from_pb(token) for token in commit.first_tokens)
    return Commit(commit.num_frames, firsts)
