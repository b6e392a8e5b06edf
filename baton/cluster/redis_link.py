"""Redis as a request may use it: answers within milliseconds, or not at all.

Owns a client, a bound on calls at once, and whether Redis is believed to answer. A call that
gets no answer in time makes the link unhealthy: later calls fail at once, until a probe in the
background has been answered. So a Redis that is dead or paused delays a request once, by at
most the time that it allows.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from baton.cluster.background import background
from baton.cluster.errors import RegistryRefused, RegistryUnavailable
from baton.cluster.redis_client import Client, answer, close, connect
from baton.cluster.registry.backoff import Backoff

MAX_CALLS = 8
PROBE_TIMEOUT_S = 1.0
T = TypeVar("T")


class RedisLink:
    """Safe to share between tasks of one event loop; `start` and `close` it."""

    def __init__(self, url: str) -> None:
        self.client: Client = connect(url)
        self._slots = asyncio.Semaphore(MAX_CALLS)
        self._probe: asyncio.Task[None] | None = None

    @property
    def healthy(self) -> bool:
        return self._probe is None

    async def call(self, start: Callable[[], Awaitable[T] | Any], timeout_s: float) -> T:
        """Raises RegistryUnavailable after `timeout_s` at the latest, waiting its turn included."""
        if not self.healthy:
            raise RegistryUnavailable("Redis is not available: it did not answer a moment ago")
        give_up = asyncio.get_running_loop().time() + timeout_s
        await self._slot(give_up)
        try:
            return await answer(start(), give_up - asyncio.get_running_loop().time())
        except RegistryRefused:
            raise
        except RegistryUnavailable:
            self._lose()
            raise
        finally:
            self._slots.release()

    async def _slot(self, give_up: float) -> None:
        if not self._slots.locked():
            await self._slots.acquire()  # at once: a timer would cost more
            return
        try:
            async with asyncio.timeout_at(give_up):
                await self._slots.acquire()
        except TimeoutError as error:  # our own crowd, not Redis
            raise RegistryUnavailable("Redis is busy with other requests") from error

    async def start(self) -> None:
        """Opens the connections, which takes longer than a request may wait, or begins to wait
        for Redis."""
        try:
            await self._greet()
        except RegistryUnavailable:
            self._lose()

    async def close(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.gather(self._probe, return_exceptions=True)
        await close(self.client)

    def _lose(self) -> None:
        if self._probe is None:
            self._probe = background(self._wait_for_answer(), name="redis-probe")

    async def _greet(self) -> None:
        """On as many connections as there may be calls."""
        pings = (self.client.ping() for _ in range(MAX_CALLS))
        await answer(asyncio.gather(*pings), PROBE_TIMEOUT_S)

    async def _wait_for_answer(self) -> None:
        backoff = Backoff(first_s=0.05, limit_s=1.0)
        while True:
            try:
                await self._greet()
                await self._let_go()
                await self._greet()
                break
            except RegistryUnavailable:
                await asyncio.sleep(backoff.next_s())
        self._probe = None

    async def _let_go(self) -> None:
        """Of idle connections: those of calls that were given up are still being closed when others
        take their places, so that an outage leaves several times as many. (A Redis Cluster's
        client keeps its connections itself.)"""
        pool = getattr(self.client, "connection_pool", None)
        if pool is not None:
            await answer(pool.disconnect(inuse_connections=False))
