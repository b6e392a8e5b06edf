"""The events of all calls to a worker by one stream; see Worker.Replies in worker.proto.

One message brings what a step drew for everybody. Invariants: the events of a call keep their
order; whoever waits for one hears when its call, the stream or the connection has ended instead.
"""

import asyncio
import itertools
import secrets
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import grpc
import grpc.aio

from baton.v1 import worker_pb2, worker_pb2_grpc


class Method(NamedTuple):
    """A server-streaming one, each of whose events comes with its bytes, which the ledger keeps:
    the stubs of grpc give the event alone."""

    path: str
    parse: Callable[[bytes], tuple[Any, bytes]]


def open_call(channel: grpc.aio.Channel, method: Method, request: Any, timeout_s: float) -> Any:
    """A call whose events are its responses."""
    begin = channel.unary_stream(
        method.path,
        request_serializer=type(request).SerializeToString,
        response_deserializer=method.parse,
    )
    return begin(request, timeout=timeout_s)


class Replies:
    """One stream per worker, opened with the first call to it."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}

    def open_call(
        self,
        channel: grpc.aio.Channel,
        address: str,
        method: Method,
        request: Any,
        timeout_s: float,
    ) -> "StreamedCall":
        """As `open_call`, but events come by the stream over `channel` to `address`."""
        stream = self._streams.get(address)
        if stream is None or stream.channel is not channel:
            stream = self._streams[address] = _Stream(channel, partial(self._over, address))
        return stream.open_call(method, request, timeout_s)

    def _over(self, address: str, stream: "_Stream") -> None:
        if self._streams.get(address) is stream:
            del self._streams[address]


class _Stream:
    """Lives as long as its connection."""

    def __init__(self, channel: grpc.aio.Channel, on_over: Callable[["_Stream"], None]) -> None:
        self.channel = channel
        self._name = secrets.token_bytes(16)
        self._numbers = itertools.count(1)
        self._calls: dict[int, StreamedCall] = {}
        self._on_over = on_over
        self._reading = asyncio.create_task(self._read(), name="replies")
        self._reading.add_done_callback(self._over)

    def open_call(self, method: Method, request: Any, timeout_s: float) -> "StreamedCall":
        number = next(self._numbers)
        request.reply_to.stream, request.reply_to.call = self._name, number
        own = open_call(self.channel, method, request, timeout_s)
        call = StreamedCall(own, method.parse, lambda: self._calls.pop(number, None))
        self._calls[number] = call
        return call

    async def _read(self) -> None:
        stub = worker_pb2_grpc.WorkerStub(self.channel)
        replies = stub.Replies(worker_pb2.RepliesRequest(stream=self._name))
        while (batch := await replies.read()) is not grpc.aio.EOF:
            for reply in batch.replies:
                if (call := self._calls.get(reply.call)) is not None:
                    call.hear(reply.event)

    def _over(self, reading: "asyncio.Task[None]") -> None:
        error = None if reading.cancelled() else reading.exception()
        if not isinstance(error, grpc.aio.AioRpcError):  # the worker leaves, or we close
            error = _error(grpc.StatusCode.UNAVAILABLE, str(error or "its replies have ended"))
        for call in list(self._calls.values()):
            call.fail(error.code(), error.details())
        self._on_over(self)


class StreamedCall:
    """What `WorkerCall` needs of a call of gRPC's. One reader at a time.

    Unread events are as many as the request has tokens, at most: a slow client holds up nobody
    else's, and the worker does not wait for it.
    """

    def __init__(
        self,
        call: Any,
        parse: Callable[[bytes], tuple[Any, bytes]],
        leave: Callable[[], object],
    ) -> None:
        """`call` brings no event, only the end. `leave`: nothing is to be heard any more."""
        self._call = call
        self._parse = parse
        self._leave = leave
        self._left = False
        self._unread: deque[bytes] = deque()
        self._failure: grpc.aio.AioRpcError | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._settling: asyncio.Task[None] | None = None
        call.add_done_callback(self._ended)

    async def read(self) -> tuple[Any, bytes]:
        """The next event and its bytes. Raises AioRpcError after the last one of a call that
        failed."""
        while not self._unread:
            if self._failure is not None:
                raise self._failure
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        return self._parse(self._unread.popleft())

    def hear(self, event: bytes) -> None:
        self._unread.append(event)
        self._wake()

    def fail(self, code: grpc.StatusCode, details: str | None) -> None:
        self._failure = self._failure or _error(code, details)
        self._wake()

    def cancel(self) -> None:
        self._leave_stream()
        self._call.cancel()
        if self._waiting is not None:
            self._waiting.cancel()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """For a call whose last event has been read: nothing else of it is heard."""
        self._leave_stream()
        self._call.add_done_callback(callback)

    def _leave_stream(self) -> None:
        self._left = True
        self._leave()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _ended(self, call: Any) -> None:
        if not self._left:
            self._settling = asyncio.create_task(self._settle(call))

    async def _settle(self, call: Any) -> None:
        """A call that went well has events on their way by the stream."""
        if (code := await call.code()) is not grpc.StatusCode.OK:
            self.fail(code, await call.details())


def _error(code: grpc.StatusCode, details: str | None) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
