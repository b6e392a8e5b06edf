"""How the events of calls get back to a router: all its calls share one stream; see worker.proto.

A step of the engine is one message then, not one per sequence. A call that names no stream gets its
events as its own responses. How a call ends, and why it failed, is always the status of the call
itself.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from baton.v1 import common_pb2
from baton.v1 import worker_pb2 as pb

MAX_STREAMS = 1024
MAX_WAITING = 1 << 14
"""Events of a stream that are not written yet; who has more to say waits."""
OPENING_S = 3.0
"""A call may come before the stream that it names."""
_NAME_LENGTHS = range(16, 65)

Write = Callable[[Message], Awaitable[None]]


class RepliesEnded(Exception):
    """The stream that a call names is not open."""


class _RouterStream:
    def __init__(self) -> None:
        self._batch = pb.ReplyBatch()
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._closed = False

    async def put(self, call: int, event: bytes) -> None:
        while len(self._batch.replies) >= MAX_WAITING and not self._closed:
            self._room.clear()
            await self._room.wait()
        if self._closed:
            raise RepliesEnded("the stream of replies has ended")
        self._batch.replies.add(call=call, event=event)
        self._changed.set()

    async def write_all(self, write: Write) -> None:
        """Until it is closed and all is written."""
        while self._batch.replies or not self._closed:
            if not self._batch.replies:
                self._changed.clear()
                await self._changed.wait()
                continue
            batch, self._batch = self._batch, pb.ReplyBatch()
            self._room.set()
            await write(batch)

    def close(self) -> None:
        """Takes no more."""
        self._closed = True
        self._changed.set()
        self._room.set()


class ReplyStreams:
    """Of one life of a worker. Used on the event loop only."""

    def __init__(self) -> None:
        self._streams: dict[bytes, _RouterStream] = {}
        self._opened = asyncio.Event()
        self._closed = False

    def __len__(self) -> int:
        return len(self._streams)

    async def serve(self, name: bytes, context: grpc.aio.ServicerContext) -> None:
        """Worker.Replies: writes until the router leaves or the worker does."""
        await self._check(name, context)
        stream = self._streams[name] = _RouterStream()
        self._opened.set()
        self._opened = asyncio.Event()
        try:
            await stream.write_all(context.write)
        finally:
            stream.close()
            del self._streams[name]

    async def answers(self, request: Any, context: grpc.aio.ServicerContext) -> Write:
        """Where the events of a call go. Raises RepliesEnded when its stream does not open."""
        if not request.HasField("reply_to"):
            write: Write = context.write
            return write
        reply_to: common_pb2.ReplyTo = request.reply_to
        stream = await self._find(reply_to.stream)

        async def put(event: Message) -> None:
            await stream.put(reply_to.call, event.SerializeToString())

        return put

    def close(self) -> None:
        """What has been said is still written; nobody says more."""
        self._closed = True
        for stream in self._streams.values():
            stream.close()

    async def _check(self, name: bytes, context: grpc.aio.ServicerContext) -> None:
        if len(name) not in _NAME_LENGTHS:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "stream must be 16 to 64 bytes")
        if name in self._streams:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "stream: it is open already")
        if self._closed:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this worker is leaving")
        if len(self._streams) >= MAX_STREAMS:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_STREAMS} streams are open already"
            )

    async def _find(self, name: bytes) -> _RouterStream:
        try:
            async with asyncio.timeout(OPENING_S):
                while name not in self._streams:
                    await self._opened.wait()
        except TimeoutError:
            raise RepliesEnded(f"reply_to.stream was not opened within {OPENING_S:g} s") from None
        return self._streams[name]
