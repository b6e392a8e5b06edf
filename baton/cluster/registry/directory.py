"""The live workers as a reader of the registry sees them, always at hand without I/O.

Owns a copy that a background task refreshes, early when a change is published. A worker leaves
the snapshot when its record expires or is withdrawn, or at once when a caller `suspect`s it;
a suspect returns with a heartbeat younger than the suspicion or as a new incarnation.
While Redis is away, or takes no writes, the last known workers stay, and so they do for a grace
period after it came back, until they have had time to announce themselves again.
"""

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from enum import StrEnum

from baton.cluster.background import background
from baton.cluster.errors import RegistryUnavailable
from baton.cluster.registry.backoff import Backoff
from baton.cluster.registry.store import Listing, Registry
from baton.cluster.workers import WorkerRecord

_log = logging.getLogger(__name__)


class RegistryState(StrEnum):
    """What the last read of Redis showed."""

    CONNECTED = "connected"
    READ_ONLY = "read_only"
    DISCONNECTED = "disconnected"


@dataclass(frozen=True)
class _Suspicion:
    incarnation: str
    since: float  # local monotonic clock


class Directory:
    """`grace_s`: how long workers missing from a newly empty Redis, and suspects while Redis
    is away, keep their state."""

    def __init__(self, registry: Registry, refresh_s: float = 0.5, grace_s: float = 4.0) -> None:
        self._registry = registry
        self._refresh_s = refresh_s
        self._grace_s = grace_s
        self._state = RegistryState.DISCONNECTED
        self._epoch: str | None = None
        self._grace_until = 0.0
        self._known: tuple[WorkerRecord, ...] = ()
        self._snapshot: tuple[WorkerRecord, ...] = ()
        self._suspicions: dict[str, _Suspicion] = {}
        self._stale = asyncio.Event()
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def connected(self) -> bool:
        """Whether Redis can be read and written."""
        return self._state is RegistryState.CONNECTED

    @property
    def state(self) -> RegistryState:
        return self._state

    def snapshot(self) -> tuple[WorkerRecord, ...]:
        """Live workers that are not suspect, sorted by worker id."""
        return self._snapshot

    @property
    def doubted(self) -> bool:
        """Whether somebody is left out as a suspect, who may be back with the next heartbeat."""
        return bool(self._suspicions)

    def suspect(self, worker_id: str, incarnation: str) -> None:
        """Takes a worker out of the snapshot until it proves to be alive."""
        self._suspicions[worker_id] = _Suspicion(incarnation, time.monotonic())
        self._update()
        self._stale.set()

    async def wait_changed(self, timeout_s: float) -> None:
        """Returns when the snapshot next changes in any way, load included, or after a while."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    async def start(self) -> None:
        """Reads once (or finds Redis away and goes on trying), then refreshes in the background."""
        backoff = Backoff()
        wait_s = await self._refresh(backoff)
        self._tasks = [
            background(self._poll(backoff, wait_s), name="directory-poll"),
            background(self._listen(), name="directory-listen"),
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def _poll(self, backoff: Backoff, wait_s: float) -> None:
        while True:
            if backoff.failures:
                await asyncio.sleep(wait_s)
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._stale.wait()
            self._stale.clear()
            wait_s = await self._refresh(backoff)

    async def _refresh(self, backoff: Backoff) -> float:
        """Reads once; seconds until the next read is due."""
        asked = time.monotonic()
        try:
            listing = await self._registry.read()
        except RegistryUnavailable as error:
            if not backoff.failures:
                _log.warning("The last known workers stay: %s", error)
            self._state = RegistryState.DISCONNECTED
            self._forgive(asked - self._grace_s)
            self._update()
            return backoff.next_s()
        if backoff.failures:
            _log.info("Redis is back.")
            backoff.reset()
        self._note(RegistryState.CONNECTED if listing.writable else RegistryState.READ_ONLY)
        self._apply(listing, asked)
        return self._refresh_s

    def _note(self, state: RegistryState) -> None:
        if state is RegistryState.READ_ONLY is not self._state:
            _log.warning("The last known workers stay: Redis takes no writes.")
        self._state = state

    def _apply(self, listing: Listing, asked: float) -> None:
        if not listing.writable:
            self._forgive(asked - self._grace_s)
        if not listing.writable or self._epoch not in (None, listing.epoch):
            self._grace_until = asked + self._grace_s
        self._epoch = listing.epoch
        records = {record.worker_id: record for record in listing.records}
        if asked < self._grace_until:
            records = {record.worker_id: record for record in self._known} | records
        self._known = tuple(records[worker_id] for worker_id in sorted(records))
        self._acquit(listing, asked)
        self._update()

    def _acquit(self, listing: Listing, asked: float) -> None:
        """Drops suspicions that a younger heartbeat or a new incarnation has refuted."""
        offset = listing.now_s - asked  # never below the true offset: errs on the side of doubt
        beats = dict(zip(listing.records, listing.beats, strict=True))
        for record, beat in beats.items():
            held = self._suspicions.get(record.worker_id)
            if held and (record.incarnation != held.incarnation or beat > held.since + offset):
                del self._suspicions[record.worker_id]
        known = {record.worker_id for record in self._known}
        self._suspicions = {k: v for k, v in self._suspicions.items() if k in known}

    def _forgive(self, before: float) -> None:
        """Without Redis no heartbeat can clear a suspect: after the grace it is tried again."""
        self._suspicions = {k: v for k, v in self._suspicions.items() if v.since > before}

    def _update(self) -> None:
        fresh = tuple(record for record in self._known if not self._is_suspect(record))
        if fresh == self._snapshot:
            return
        self._snapshot = fresh
        self._changed.set()
        self._changed = asyncio.Event()

    def _is_suspect(self, record: WorkerRecord) -> bool:
        held = self._suspicions.get(record.worker_id)
        return held is not None and held.incarnation == record.incarnation

    async def _listen(self) -> None:
        """Turns published changes into early refreshes; the poll alone would be correct too."""
        backoff = Backoff()
        while True:
            with contextlib.suppress(RegistryUnavailable):
                async with contextlib.aclosing(self._registry.changes()) as changes:
                    async for _ in changes:
                        backoff.reset()
                        self._stale.set()
            await asyncio.sleep(backoff.next_s())
