"""A worker's side of the prefix index: tells Redis which blocks it holds.

Changes go out in numbered batches, each on top of the one before it. Whenever Redis may know
something else (at the start, after a failed call, when it lost its data, when events were lost)
the next thing sent is a snapshot. Knows blocks by hash only, and never makes the engine wait.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Protocol

from baton.cluster.background import background
from baton.cluster.errors import RegistryUnavailable
from baton.cluster.prefix_index.matches import WorkerKey
from baton.cluster.prefix_index.reachable import Change, Reachable
from baton.cluster.prefix_index.store import CHUNK, PrefixStore
from baton.cluster.redis_client import answer
from baton.cluster.registry.backoff import Backoff

_log = logging.getLogger(__name__)


class BlockSource(Protocol):
    """The worker's cache, as far as it is told to others."""

    def drain(self) -> Sequence[Change] | None:
        """Changes since the last call; None when some were lost."""
        ...

    def snapshot(self) -> Sequence[tuple[bytes, bytes]]:
        """Hash and parent of every block."""
        ...


class PrefixPublisher:
    """`news` wakes it: call it on the event loop when the source has something."""

    def __init__(
        self,
        store: PrefixStore,
        source: BlockSource,
        worker: WorkerKey,
        heartbeat_s: float = 1.0,
        lease_s: float = 10.0,
        gather_s: float = 0.02,
    ) -> None:
        self._store = store
        self._source = source
        self._worker = worker
        self._heartbeat_s = heartbeat_s
        self._lease_s = lease_s
        self._gather_s = gather_s
        self._blocks = Reachable()
        self._number = 0
        self._in_doubt = True
        self._backoff = Backoff()
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def news(self) -> None:
        self._news.set()

    async def start(self) -> None:
        self._task = background(self._run(), name="prefix-publisher")

    async def stop(self) -> None:
        """Ends the publishing and takes the worker's entries out of the index."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        try:
            await answer(self._store.withdraw(self._worker))
        except RegistryUnavailable as error:
            _log.info("Left the prefix index without withdrawing; the entries expire. %s", error)

    async def _run(self) -> None:
        while True:
            self._absorb()
            try:
                await self._publish()
            except RegistryUnavailable as error:
                if not self._backoff.failures:
                    _log.warning("Cannot publish cached prefixes, trying on: %s", error)
                self._in_doubt = True
                await asyncio.sleep(self._backoff.next_s())
                continue
            self._backoff.reset()
            if not self._in_doubt:
                await self._wait()

    async def _wait(self) -> None:
        """Until there is news, or the lease should be renewed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._heartbeat_s):
                await self._news.wait()
                await asyncio.sleep(self._gather_s)  # blocks of one step come together
        self._news.clear()

    def _absorb(self) -> None:
        changes = self._source.drain()
        if changes is None:
            self._blocks = Reachable(self._source.snapshot())
            self._in_doubt = True
        else:
            self._blocks.apply(changes)

    async def _publish(self) -> None:
        added, removed = self._blocks.take_changes()
        if self._in_doubt:
            await self._send_snapshot()
        elif not added and not removed:
            await self._send((), ())
        else:
            for part in _parts(removed):
                await self._send(part, ())
            for part in _parts(added):
                await self._send((), part)

    async def _send(self, removed: Sequence[bytes], added: Sequence[bytes]) -> None:
        if self._in_doubt:
            return
        number = (self._number, self._number + bool(removed or added))
        known: int = await answer(
            self._store.change(self._worker, number, removed, added, self._lease_s)
        )
        self._number = number[1]
        self._in_doubt = not known

    async def _send_snapshot(self) -> None:
        self._number += 1
        parts = _parts(list(self._blocks.visible)) or [[]]
        for part in parts:
            last = part is parts[-1]
            await answer(self._store.replace(self._worker, self._number, part, self._lease_s, last))
        self._in_doubt = False


def _parts(hashes: list[bytes]) -> list[list[bytes]]:
    return [hashes[at : at + CHUNK] for at in range(0, len(hashes), CHUNK)]
