"""Redis as a request may use it: answers within milliseconds, or not at all.

Owns a client, a bound on calls at once, and whether Redis is believed to answer. A call that
gets no answer in time makes the link unhealthy: later calls fail at once, until a probe in the
background has been answered. So a Redis that is dead or paused delays a request once, by at
most the time that it allows.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from baton.cluster.errors import RegistryRefused, RegistryUnavailable
from baton.cluster.redis_client import CALL_TIMEOUT_S, Client, answer, close, connect
from baton.cluster.registry.backoff import Backoff

MAX_CALLS = 16
T = TypeVar("T")


class RedisLink:
    """Safe to share between tasks of one event loop; `close` it."""

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
        try:
            async with asyncio.timeout_at(give_up):
                await self._slots.acquire()
        except TimeoutError as error:  # our own crowd, not Redis
            raise RegistryUnavailable("Redis is busy with other requests") from error
        try:
            return await answer(start(), give_up - asyncio.get_running_loop().time())
        except RegistryRefused:
            raise
        except RegistryUnavailable:
            if self._probe is None:
                self._probe = asyncio.create_task(self._wait_for_answer(), name="redis-probe")
            raise
        finally:
            self._slots.release()

    async def close(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.gather(self._probe, return_exceptions=True)
        await close(self.client)

    async def _wait_for_answer(self) -> None:
        backoff = Backoff(first_s=0.05, limit_s=1.0)
        while True:
            try:
                await answer(self.client.ping(), CALL_TIMEOUT_S)
                break
            except RegistryUnavailable:
                await asyncio.sleep(backoff.next_s())
        self._probe = None
