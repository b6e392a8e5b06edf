"""The events of calls to a worker: by one stream for all of them, or as each call's responses.

By the stream, one message brings what a step drew for everybody (Worker.Replies in worker.proto).
Invariants: the events of a call keep their order; whoever waits for one hears when its call, the
stream or the connection has ended instead.
"""

import asyncio
import itertools
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

import grpc
import grpc.aio

from baton.v1 import worker_pb2, worker_pb2_grpc

LAST_EVENTS_S = 3.0
"""So long after its call a call's last event may come by the stream."""
_OWN_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.PERMISSION_DENIED)
"""Of a stream that say the same of its calls."""


class Method(NamedTuple):
    """A server-streaming one, each of whose events comes with its bytes, which the ledger keeps:
    the stubs of grpc give the event alone."""

    path: str
    parse: Callable[[bytes], tuple[Any, bytes]]


class DirectCall:
    """Its events are its responses. What it and `StreamedCall` do is what `WorkerCall` needs."""

    def __init__(
        self, channel: grpc.aio.Channel, method: Method, request: Any, timeout_s: float
    ) -> None:
        begin = channel.unary_stream(
            method.path,
            request_serializer=type(request).SerializeToString,
            response_deserializer=method.parse,
        )
        self.rpc = begin(request, timeout=timeout_s)

    def read(self) -> Awaitable[Any]:
        """The next event and its bytes, or EOF. Raises AioRpcError."""
        reading: Awaitable[Any] = self.rpc.read()
        return reading

    def cancel(self) -> None:
        self.rpc.cancel()

    def let_end(self) -> None:
        """Its last event has been read; its status is still to come. Kept until then: gRPC cancels
        a call that nobody holds."""
        self.rpc.add_done_callback(_ended)


class Replies:
    """One stream per worker, opened with the first call to it."""

    def __init__(self) -> None:
        self._streams: dict[str, _WorkerStream] = {}

    def call(
        self,
        channel: grpc.aio.Channel,
        address: str,
        method: Method,
        request: Any,
        timeout_s: float,
    ) -> "StreamedCall":
        """Over `channel` to `address`. A new channel, with new certificates, has a new stream."""
        stream = self._streams.get(address)
        if stream is None or stream.channel is not channel:
            stream = self._streams[address] = _WorkerStream(channel, partial(self._drop, address))
        return stream.call(method, request, timeout_s)

    def _drop(self, address: str, stream: "_WorkerStream") -> None:
        if self._streams.get(address) is stream:
            del self._streams[address]


class _WorkerStream:
    """Lives as long as its connection."""

    def __init__(
        self, channel: grpc.aio.Channel, on_end: Callable[["_WorkerStream"], None]
    ) -> None:
        self.channel = channel
        self._name = secrets.token_bytes(16)
        self._numbers = itertools.count(1)
        self._calls: dict[int, StreamedCall] = {}
        self._on_end = on_end
        self._reading = asyncio.create_task(self._read(), name="replies")
        self._reading.add_done_callback(self._end)

    def call(self, method: Method, request: Any, timeout_s: float) -> "StreamedCall":
        number = next(self._numbers)
        request.reply_to.stream, request.reply_to.call = self._name, number
        own = DirectCall(self.channel, method, request, timeout_s).rpc
        call = StreamedCall(own, method.parse, lambda: self._calls.pop(number, None))
        self._calls[number] = call
        return call

    async def _read(self) -> None:
        stub = worker_pb2_grpc.WorkerStub(self.channel)
        replies = stub.Replies(worker_pb2.RepliesRequest(stream=self._name))
        while (batch := await replies.read()) is not grpc.aio.EOF:
            self._deal_out(batch)

    def _deal_out(self, batch: worker_pb2.ReplyBatch) -> None:
        for reply in batch.replies:
            if (call := self._calls.get(reply.call)) is not None:
                call.hear(reply.event)

    def _end(self, reading: "asyncio.Task[None]") -> None:
        error = None if reading.cancelled() else reading.exception()
        code, details = _reason(error)
        for call in list(self._calls.values()):
            call.fail(code, details)
        self._on_end(self)


class StreamedCall:
    """Its events come by the stream of its worker. One reader at a time.

    What is unread is bounded by the request's tokens; the ledger keeps as much of it anyway. So a
    slow client holds up nobody else's events, and the worker does not wait for it.
    """

    def __init__(
        self,
        own: Any,
        parse: Callable[[bytes], tuple[Any, bytes]],
        leave: Callable[[], object],
    ) -> None:
        """`own` is a call of gRPC that brings no event, only the end; `leave` takes this one out of
        its stream."""
        self._own = own
        self._parse = parse
        self._leave = leave
        self._left = False
        self._unread: deque[bytes] = deque()
        self._at_end: grpc.aio.AioRpcError | Any = None
        """What there is to be read after the last event: a failure, or EOF."""
        self._waiting: asyncio.Future[None] | None = None
        self._settling: asyncio.Task[None] | None = None
        self._last_events: asyncio.TimerHandle | None = None
        own.add_done_callback(self._ended)

    async def read(self) -> Any:
        """The next event and its bytes, or EOF. Raises AioRpcError, after the last event of a call
        that failed."""
        while not self._unread:
            if isinstance(self._at_end, grpc.aio.AioRpcError):
                raise self._at_end
            if self._at_end is not None:
                return self._at_end
            if self._left:
                raise asyncio.CancelledError
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        return self._parse(self._unread.popleft())

    def hear(self, event: bytes) -> None:
        self._unread.append(event)
        self._wake()

    def fail(self, code: grpc.StatusCode, details: str | None) -> None:
        self._finish(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details))

    def cancel(self) -> None:
        self._leave_stream()
        self._unread.clear()
        self._own.cancel()
        if self._waiting is not None:
            self._waiting.cancel()

    def let_end(self) -> None:
        """Its last event has been read; its status says nothing new."""
        self._leave_stream()

    def _leave_stream(self) -> None:
        self._left = True
        self._leave()
        if self._last_events is not None:
            self._last_events.cancel()

    def _finish(self, at_end: Any) -> None:
        if self._at_end is None:
            self._at_end = at_end
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _ended(self, own: Any) -> None:
        if not self._left:
            self._settling = asyncio.create_task(self._settle(own))

    async def _settle(self, own: Any) -> None:
        """A call that went well may have events on their way by the stream."""
        if (code := await own.code()) is not grpc.StatusCode.OK:
            self.fail(code, await own.details())
        elif not self._left:
            loop = asyncio.get_running_loop()
            self._last_events = loop.call_later(LAST_EVENTS_S, self._finish, grpc.aio.EOF)


def _reason(error: BaseException | None) -> tuple[grpc.StatusCode, str]:
    """Why the calls of a stream that ended so have failed; None: the worker leaves, or we do."""
    if isinstance(error, grpc.aio.AioRpcError):
        code, details = error.code(), error.details() or ""
        if code in _OWN_CODES:
            return code, details
        return grpc.StatusCode.UNAVAILABLE, f"its stream of replies: {code.name}: {details}"
    return grpc.StatusCode.UNAVAILABLE, f"its stream of replies has ended: {error or 'it leaves'}"


def _ended(rpc: Any) -> None:
    """Nothing is left to be done."""
