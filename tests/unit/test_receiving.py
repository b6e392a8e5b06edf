"""What the receiving end says about frames and the commit behind them."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from baton.engine.transfer.base import Commit, HandoffDamaged, TransportFailed
from baton.engine.transfer.plan import FramePlan
from baton.v1 import kv_pb2
from baton.worker.kv_wire import WireFrame
from decode_service.receiving import FrameReader, Receiving

HANG_S = 20.0


class Handoff:
    """The state of a hand-off, without a cache."""

    def __init__(self) -> None:
        self.num_frames = 0
        self.committed = False

    def expect(self, sequence: int, plan: FramePlan) -> object:
        assert sequence == self.num_frames
        self.num_frames += 1
        return object()

    def applied(self, sequence: int) -> None:
        return

    def expect_again(self, sequence: int) -> None:
        self.num_frames = sequence

    def commit(self, commit: Commit) -> None:
        if commit.num_frames != self.num_frames:
            raise HandoffDamaged(f"{commit.num_frames} frames sent, {self.num_frames} received")
        self.committed = True


class Sending:
    """The other end: `say` puts a message on the wire; payloads are read when `gate` is open, the
    first `failures` of them in vain."""

    def __init__(self, failures: int = 0) -> None:
        self.acks: asyncio.Queue[kv_pb2.KVAck] = asyncio.Queue()
        self.gate = asyncio.Event()
        self.handoff = Handoff()
        self._failures = failures
        self._wire: asyncio.Queue[kv_pb2.KVFrame | Exception] = asyncio.Queue()
        inbox: Any = SimpleNamespace(deliver=self._deliver)
        handoff: Any = self.handoff
        reader = FrameReader(self._frames(), HANG_S)
        self.receiving = Receiving(handoff, inbox, reader, self.acks.put)

    def say(self, **frame: Any) -> None:
        self._wire.put_nowait(kv_pb2.KVFrame(**frame))

    def fail(self, error: Exception) -> None:
        """The next read does."""
        self._wire.put_nowait(error)

    async def all_read(self) -> None:
        await self._wire.join()

    async def _frames(self) -> AsyncIterator[WireFrame]:
        while True:
            frame = await self._wire.get()
            if isinstance(frame, Exception):
                raise frame
            yield WireFrame(frame)
            self._wire.task_done()  # whoever reads has taken it in, and asks for more

    async def _deliver(self, *_: object) -> None:
        await self.gate.wait()
        if self._failures:
            self._failures -= 1
            raise TransportFailed("gone")


def data(sequence: int) -> kv_pb2.KVData:
    return kv_pb2.KVData(sequence=sequence, layer_count=1, blocks=[sequence], payload=b"x")


async def test_a_commit_that_came_behind_an_unreadable_frame_comes_again_with_it() -> None:
    """It was once taken for the commit of what had been dropped, and the hand-off was lost."""
    sending = Sending(failures=1)
    async with asyncio.timeout(HANG_S):
        running = asyncio.create_task(sending.receiving.run())
        sending.say(data=data(0))
        sending.say(commit=kv_pb2.KVCommit(num_frames=1))
        await sending.all_read()
        sending.gate.set()
        assert await sending.acks.get() == kv_pb2.KVAck(frames=0, unreadable="gone")
        sending.say(data=data(0))
        sending.say(commit=kv_pb2.KVCommit(num_frames=1))
        await running
    assert sending.handoff.committed


async def test_frames_are_acknowledged_one_by_one_and_the_last_ones_by_the_commit() -> None:
    sending = Sending()
    async with asyncio.timeout(HANG_S):
        running = asyncio.create_task(sending.receiving.run())
        sending.gate.set()
        sending.say(data=data(0))
        assert await sending.acks.get() == kv_pb2.KVAck(frames=1)
        sending.gate.clear()
        sending.say(data=data(1))
        sending.say(commit=kv_pb2.KVCommit(num_frames=2))
        await sending.all_read()
        sending.gate.set()
        await running
    assert sending.handoff.committed and sending.acks.empty()


@pytest.mark.parametrize(
    ("broken", "told"),
    [(DecodeError("garbage"), HandoffDamaged), (RuntimeError("a bug"), RuntimeError)],
)
async def test_what_cannot_be_read_ends_the_hand_off(
    broken: Exception, told: type[Exception]
) -> None:
    """Only the reading ended; who applied the frames waited for the next one for ever."""
    sending = Sending()
    sending.gate.set()
    sending.say(data=data(0))
    sending.fail(broken)
    with pytest.raises(told, match=str(broken)):
        async with asyncio.timeout(HANG_S):
            await sending.receiving.run()
