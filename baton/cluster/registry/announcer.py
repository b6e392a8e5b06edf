"""Keeps one worker's record alive in the registry.

Owns a background task that publishes a fresh snapshot every interval, at once on
`announce_now`, and soon after Redis comes back. Knows nothing of what the snapshot holds.
Never raises because Redis is away; the record's time to live is the backstop.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from baton.cluster.background import background
from baton.cluster.errors import RegistryUnavailable
from baton.cluster.registry.backoff import Backoff
from baton.cluster.registry.store import Registry
from baton.cluster.workers import WorkerRecord

_log = logging.getLogger(__name__)


class Announcer:
    """`snapshot` is called on the event loop before every publish."""

    def __init__(
        self,
        registry: Registry,
        snapshot: Callable[[], WorkerRecord],
        interval_s: float = 1.0,
        ttl_s: float = 3.0,
    ) -> None:
        self._registry = registry
        self._snapshot = snapshot
        self._interval_s = interval_s
        self._ttl_s = ttl_s
        self._backoff = Backoff()
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._ousted = False

    async def start(self) -> None:
        """Publishes once (or finds Redis away and goes on trying), then beats in the background."""
        wait_s = await self._beat()
        self._task = background(self._run(wait_s), name="announcer")

    def announce_now(self) -> None:
        """Publishes a change without waiting for the next beat."""
        self._wanted.set()

    async def stop(self) -> None:
        """Stops beating, then withdraws the record."""
        if self._task is None:
            return
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._task = None
        try:
            await self._registry.withdraw(self._snapshot())
        except RegistryUnavailable as error:
            _log.info("Left the registry without withdrawing; the record expires. %s", error)

    async def _run(self, wait_s: float) -> None:
        while True:
            # While Redis is away a wish for an early beat must not defeat the backoff.
            if self._backoff.failures:
                await asyncio.sleep(wait_s)
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._wanted.wait()
            self._wanted.clear()
            wait_s = await self._beat()

    async def _beat(self) -> float:
        """Publishes once; seconds until the next beat is due."""
        try:
            accepted = await self._registry.publish(self._snapshot(), self._ttl_s)
        except RegistryUnavailable as error:
            if not self._backoff.failures:
                _log.warning("Cannot announce this worker, trying on: %s", error)
            return min(self._backoff.next_s(), self._interval_s * 2)
        if self._backoff.failures:
            _log.info("Redis is back; announced again.")
            self._backoff.reset()
        if not accepted and not self._ousted:
            _log.error("A newer process uses this worker's id; this one is not announced.")
        self._ousted = not accepted
        return self._interval_s
