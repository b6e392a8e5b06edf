"""The requests a worker is busy with, its totals, and how it stops taking more."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from baton.cluster.workers import WorkerLink


class Draining(Exception):
    """The worker takes no new work."""


@dataclass(frozen=True)
class TransferResources:
    """What the transports hold now; see worker.proto."""

    torch_groups: int = 0
    shm_bytes: int = 0
    staging_bytes: int = 0
    in_flight_bytes: int = 0


@dataclass
class TransferCounters:
    """Hand-offs since the start of the process; see WorkerCounters in worker.proto."""

    handoffs: int = 0
    handoffs_failed: int = 0
    blocks: int = 0
    bytes: int = 0
    in_flight: int = 0
    links: Callable[[], tuple[WorkerLink, ...]] = tuple
    resources: Callable[[], TransferResources] = lambda: TransferResources()


class Activity:
    """Counts running requests. Used on the event loop only."""

    def __init__(self) -> None:
        self.draining = False
        self.transfers = TransferCounters()
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def request(self) -> Iterator[None]:
        if self.draining:
            raise Draining("this worker is draining and takes no new requests")
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0:
                self._idle.set()

    def stop_taking(self) -> None:
        """Refuses new requests from now on."""
        self.draining = True

    def take_again(self) -> None:
        self.draining = False

    async def idle(self, timeout_s: float) -> bool:
        """True when no request is running, False after the deadline."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
