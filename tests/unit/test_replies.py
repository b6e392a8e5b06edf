"""A stream of replies: at the worker, what waits is bounded; at the router, calls end well."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message

from baton.v1 import worker_pb2
from baton.worker import replies
from baton.worker.replies import RepliesEnded, _RouterStream
from router.replies import StreamedCall, _reason


async def test_who_has_more_to_say_than_there_is_room_for_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replies, "MAX_WAITING", 2)
    stream, written, go = _RouterStream(), list[list[int]](), asyncio.Event()

    async def slow(batch: Message) -> None:
        await go.wait()
        assert isinstance(batch, worker_pb2.ReplyBatch)
        written.append([reply.call for reply in batch.replies])

    writing = asyncio.create_task(stream.write_all(slow))
    for call in (1, 2):
        await stream.put(call, b"")
    await asyncio.sleep(0)  # the writer takes them
    for call in (3, 4):
        await stream.put(call, b"")
    waiting = asyncio.create_task(stream.put(5, b""))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    go.set()
    await waiting
    stream.close()
    await writing
    assert written == [[1, 2], [3, 4], [5]]


async def test_who_waits_for_room_hears_that_the_stream_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replies, "MAX_WAITING", 0)
    stream = _RouterStream()
    waiting = asyncio.create_task(stream.put(1, b""))
    await asyncio.sleep(0)
    stream.close()
    for put in (waiting, stream.put(1, b"")):
        with pytest.raises(RepliesEnded):
            await put


class FakeCall:
    """gRPC's, as far as a streamed call needs it."""

    def __init__(self) -> None:
        self.cancelled = False
        self.status = grpc.StatusCode.OK
        self._callbacks: list[Any] = []

    def add_done_callback(self, callback: Any) -> None:
        self._callbacks.append(callback)

    def end(self, status: grpc.StatusCode) -> None:
        self.status = status
        for callback in self._callbacks:
            callback(self)

    def cancel(self) -> None:
        self.cancelled = True
        self.end(grpc.StatusCode.CANCELLED)

    async def code(self) -> grpc.StatusCode:
        return self.status

    async def details(self) -> str:
        return "why"


def streamed(own: FakeCall, left: list[int]) -> StreamedCall:
    return StreamedCall(own, lambda raw: (raw.decode(), raw), lambda: left.append(1))


async def test_a_status_that_overtakes_the_last_events_loses_none() -> None:
    own = FakeCall()
    call = streamed(own, [])
    own.end(grpc.StatusCode.OK)
    reading = asyncio.create_task(call.read())
    await asyncio.sleep(0)
    call.hear(b"last")
    assert await reading == ("last", b"last")


async def test_what_came_before_a_failure_is_read_before_it() -> None:
    own = FakeCall()
    call = streamed(own, [])
    call.hear(b"one")
    own.end(grpc.StatusCode.RESOURCE_EXHAUSTED)
    await asyncio.sleep(0.01)
    assert await call.read() == ("one", b"one")
    for _ in range(2):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call.read()
        assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert failed.value.details() == "why"


async def test_the_first_failure_counts() -> None:
    call = streamed(FakeCall(), [])
    call.fail(grpc.StatusCode.UNAVAILABLE, "the connection")
    call.fail(grpc.StatusCode.CANCELLED, "later")
    with pytest.raises(grpc.aio.AioRpcError, match="the connection"):
        await call.read()


async def test_cancelling_ends_who_waits_and_leaves_the_stream() -> None:
    own, left = FakeCall(), list[int]()
    call = streamed(own, left)
    reading = asyncio.create_task(call.read())
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait({reading})
    assert reading.cancelled() and own.cancelled and left


async def test_a_read_after_cancelling_is_cancelled_as_well() -> None:
    """It waited for ever: a task that was to read ahead began after the call had been left."""
    own = FakeCall()
    call = streamed(own, [])
    call.hear(b"one")
    reading = asyncio.create_task(call.read())
    call.cancel()
    await asyncio.wait({reading}, timeout=5)
    assert reading.cancelled()


async def test_a_call_whose_last_event_was_read_is_not_cancelled() -> None:
    own, left = FakeCall(), list[int]()
    call = streamed(own, left)
    call.let_end()
    own.end(grpc.StatusCode.OK)
    assert left and not own.cancelled


async def test_a_call_that_went_well_without_its_last_event_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It hung until the client's deadline."""
    monkeypatch.setattr("router.replies.LAST_EVENTS_S", 0.05)
    own = FakeCall()
    call = streamed(own, [])
    call.hear(b"one")
    own.end(grpc.StatusCode.OK)
    assert await call.read() == ("one", b"one")
    async with asyncio.timeout(5):
        assert await call.read() is grpc.aio.EOF


async def test_a_call_that_was_left_ends_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.replies.LAST_EVENTS_S", 0.01)
    own = FakeCall()
    call = streamed(own, [])
    own.end(grpc.StatusCode.OK)
    await asyncio.sleep(0)  # its end is known
    call.hear(b"last")
    assert await call.read() == ("last", b"last")
    call.let_end()
    await asyncio.sleep(0.05)
    with pytest.raises(asyncio.CancelledError):
        await call.read()


@pytest.mark.parametrize(
    ("error", "code", "details"),
    [
        (None, "UNAVAILABLE", "its stream of replies has ended: it leaves"),
        (ValueError("x"), "UNAVAILABLE", "its stream of replies has ended: x"),
        ("UNAVAILABLE", "UNAVAILABLE", "why"),
        ("PERMISSION_DENIED", "PERMISSION_DENIED", "why"),
        ("UNIMPLEMENTED", "UNAVAILABLE", "its stream of replies: UNIMPLEMENTED: why"),
        ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "its stream of replies: RESOURCE_EXHAUSTED: why"),
    ],
)
def test_what_ends_a_stream_is_no_answer_of_its_calls(
    error: Exception | str | None, code: str, details: str
) -> None:
    """A worker without the method made requests fail as if they were wrong."""
    if isinstance(error, str):
        nothing = grpc.aio.Metadata()
        error = grpc.aio.AioRpcError(grpc.StatusCode[error], nothing, nothing, "why")
    assert _reason(error) == (grpc.StatusCode[code], details)
