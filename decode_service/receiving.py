"""The receiving half of one KVTransfer.Push: reads ahead, applies in order, acknowledges.

A frame is written by the thread that has its bytes, while the next ones arrive, at most
`_READ_AHEAD`. When a payload is not where its header says, the sender is told, and everything
from that frame on, a commit too, is dropped until it comes again.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

from google.protobuf.message import DecodeError

from baton.engine.transfer.base import (
    Carrier,
    Commit,
    HandoffDamaged,
    ShmBlocks,
    TorchMessage,
    TransportFailed,
)
from baton.engine.transfer.plan import RAW, FramePlan
from baton.v1 import kv_pb2
from baton.worker.kv_wire import WireFrame
from baton.worker.translate import first_token_from_pb
from decode_service.inbox import Inbox
from decode_service.incoming import IncomingHandoff

_READ_AHEAD = 2


class _Incoming(NamedTuple):
    """A frame that is being written."""

    sequence: int
    writing: "asyncio.Task[None]"
    attempt: int
    """How often frames had to come again before it."""


class _Closing(NamedTuple):
    """The commit, of an attempt."""

    commit: kv_pb2.KVCommit
    attempt: int


class FrameReader:
    """Frames in order; `timeout_s`: a sender that is silent for longer has lost its hand-off."""

    def __init__(self, frames: AsyncIterator[WireFrame], timeout_s: float) -> None:
        self._frames = frames
        self._timeout_s = timeout_s
        self._ahead: asyncio.Future[WireFrame | None] | None = None
        """Survives whoever waited for it: gRPC cannot read on after a read that was cancelled."""

    async def next(self) -> WireFrame:
        frame = await self._next()
        if frame is None:
            raise HandoffDamaged("the sender ended before its commit")
        return frame

    async def drain(self) -> None:
        """Takes and drops what still comes. A sender whose write fails would never learn why."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while await self._next() is not None:
                    continue
        except (TimeoutError, HandoffDamaged):
            return  # nobody is there who could be told

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()

    async def _next(self) -> WireFrame | None:
        if self._ahead is None:
            self._ahead = asyncio.ensure_future(anext(self._frames, None))
        done, _ = await asyncio.wait({self._ahead}, timeout=self._timeout_s)
        if not done:
            raise HandoffDamaged(f"the sender was silent for {self._timeout_s} s")
        ahead, self._ahead = self._ahead, None
        try:
            return ahead.result()
        except DecodeError as error:
            raise HandoffDamaged(f"a frame cannot be read: {error}") from error


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
        self._queue: asyncio.Queue[_Incoming | _Closing | Exception] = asyncio.Queue(_READ_AHEAD)
        self._attempt = 0
        self._dropping = False
        self._closing = -1
        """The attempt whose commit has come."""

    async def run(self) -> None:
        """Until the commit is applied. Raises HandoffError."""
        reading = asyncio.create_task(self._read())
        try:
            while not self._handoff.committed:
                item = await self._queue.get()
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, _Incoming):
                    await self._finish(item)
                elif item.attempt == self._attempt:
                    self._handoff.commit(_commit_from_pb(item.commit))
        finally:
            reading.cancel()

    async def _read(self) -> None:
        try:
            while True:
                frame = await self._reader.next()
                kind = frame.message.WhichOneof("frame")
                if kind == "data":
                    await self._begin(frame)
                elif kind != "commit":
                    raise HandoffDamaged("a second opening frame came before the commit")
                elif not self._dropping:
                    self._closing = self._attempt
                    await self._queue.put(_Closing(frame.message.commit, self._attempt))
        except Exception as error:  # nobody else would end `run`
            await self._queue.put(error)

    async def _begin(self, frame: WireFrame) -> None:
        data = frame.message.data
        sequence, checksum = data.sequence, data.checksum if data.HasField("checksum") else None
        if self._dropping and sequence > self._handoff.num_frames:
            return
        self._dropping = False
        plan = FramePlan(data.layer_start, data.layer_count, tuple(data.blocks), data.codec or RAW)
        room = self._handoff.expect(sequence, plan)
        writing = asyncio.create_task(self._inbox.deliver(_carrier(frame), checksum, room))
        writing.add_done_callback(_seen)
        await self._queue.put(_Incoming(sequence, writing, self._attempt))

    async def _finish(self, incoming: _Incoming) -> None:
        if incoming.attempt != self._attempt:
            return
        try:
            # Shielded: a write that runs is not cancelled, it ends and `abort` waits for it.
            await asyncio.shield(incoming.writing)
        except TransportFailed as error:
            self._attempt += 1
            self._dropping = True
            self._handoff.expect_again(incoming.sequence)
            await self._acknowledge(
                kv_pb2.KVAck(frames=incoming.sequence, unreadable=str(error) or "unreadable")
            )
            return
        self._handoff.applied(incoming.sequence)
        if self._closing != self._attempt:  # else the commit's own acknowledgement is next
            await self._acknowledge(kv_pb2.KVAck(frames=incoming.sequence + 1))


def _seen(writing: "asyncio.Task[None]") -> None:
    """Its error has been told if anybody still waits for it."""
    if not writing.cancelled():
        writing.exception()


def _carrier(frame: WireFrame) -> Carrier:
    data = frame.message.data
    if data.HasField("shm"):
        shm = data.shm
        return ShmBlocks(shm.pid, shm.fd, shm.token, shm.num_blocks, tuple(shm.blocks))
    if data.HasField("torch"):
        torch = data.torch
        return TorchMessage(torch.group, torch.tag, torch.size, torch.has_checksum)
    return data.payload if frame.payload is None else frame.payload


def _commit_from_pb(commit: kv_pb2.KVCommit) -> Commit:
    firsts = tuple(first_token_from_pb(token) for token in commit.first_tokens)
    return Commit(commit.num_frames, firsts)
