"""Two ranks find each other over the Join call: each end's store is told what the other sets."""

import asyncio
import contextlib
from collections.abc import AsyncIterable, Awaitable, Callable
from types import TracebackType

import grpc

from baton.engine.transfer.pair_store import MAX_KEYS, PairStore
from baton.v1 import kv_pb2


class Rendezvous:
    """One end, for as long as the context is open."""

    def __init__(self, timeout_s: float) -> None:
        loop, self._told = asyncio.get_running_loop(), asyncio.Queue[kv_pb2.RendezvousKey](MAX_KEYS)

        def tell(key: str, value: bytes) -> None:
            entry = kv_pb2.RendezvousKey(key=key, value=value)
            loop.call_soon_threadsafe(self._told.put_nowait, entry)

        self.store = PairStore(tell, timeout_s)
        self._left = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Rendezvous":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def talk(
        self,
        write: Callable[[kv_pb2.RendezvousKey], Awaitable[object]],
        heard: AsyncIterable[kv_pb2.RendezvousKey],
    ) -> None:
        """`write` tells the other end; `heard` is what it tells, until it leaves."""

        async def speak() -> None:
            while True:
                await write(await self._told.get())

        async def listen() -> None:
            try:
                async for entry in heard:
                    self.store.put(entry.key, entry.value)
            finally:
                self._left.set()

        async def quietly(work: Awaitable[None]) -> None:
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                await work

        self._tasks = [asyncio.create_task(quietly(work)) for work in (speak(), listen())]

    async def over(self, group_ended: Awaitable[object]) -> None:
        """Returns when the group has ended or the other end has left."""
        ends = {asyncio.ensure_future(group_ended), asyncio.create_task(self._left.wait())}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
