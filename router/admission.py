"""One bounded, fair queue in front of the workers.

Owns how many requests run and who goes next; knows nothing of workers but "accepted" and
"refused". A request that the workers refuse for lack of room goes back to its old place.
Whoever arrives while others wait goes behind them. The next in line is let through when a
request ends, when one was accepted (there may be more room) and when workers changed.
Invariant: running + waiting requests are bounded; every wait ends at its deadline.
"""

import asyncio
import itertools
from bisect import insort
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.cluster.errors import Overloaded

RETRY_AFTER_S = 1.0


class QueueFull(Overloaded):
    """The queue holds as many as it may."""


class QueueTimeout(Overloaded):
    """The deadline passed before there was room."""


class Admission:
    def __init__(self, max_running: int, max_queue: int) -> None:
        self._max_running = max_running
        self._max_queue = max_queue
        self._running = 0
        self._tickets = itertools.count()
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []

    @property
    def running(self) -> int:
        return self._running

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    @asynccontextmanager
    async def slot(self, deadline: float) -> AsyncIterator["Slot"]:
        """Holds a running slot; `deadline` (event loop time) bounds every wait for room."""
        slot = Slot(self, next(self._tickets), deadline)
        await slot.enter()
        try:
            yield slot
        finally:
            slot.leave()

    def workers_changed(self) -> None:
        """A worker came, went or reported another load: somebody may fit now."""
        self._grant()

    def _grant(self) -> None:
        while self._waiters and self._running < self._max_running:
            _, future = self._waiters.pop(0)
            if not future.done():
                self._running += 1
                future.set_result(None)
                return

    async def _wait(self, ticket: int, deadline: float) -> None:
        if len(self._waiters) >= self._max_queue:
            raise QueueFull("The queue is full, try again later.", retry_after_s=RETRY_AFTER_S)
        waiter = (ticket, asyncio.get_running_loop().create_future())
        insort(self._waiters, waiter, key=lambda entry: entry[0])
        try:
            async with asyncio.timeout_at(deadline):
                await waiter[1]
        except BaseException as error:
            self._abandon(waiter)
            if isinstance(error, TimeoutError):
                raise QueueTimeout(
                    "No room on the workers within the time a request may queue.",
                    retry_after_s=RETRY_AFTER_S,
                ) from error
            raise

    def _abandon(self, waiter: tuple[int, asyncio.Future[None]]) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        elif waiter[1].done() and not waiter[1].cancelled():
            self._release()  # it was granted in the same moment

    def _release(self) -> None:
        self._running -= 1
        self._grant()


class Slot:
    """One request's place: waiting, running or gone."""

    def __init__(self, admission: Admission, ticket: int, deadline: float) -> None:
        self._admission = admission
        self._ticket = ticket
        self._deadline = deadline
        self._held = False

    async def enter(self) -> None:
        admission = self._admission
        if admission._waiters or admission._running >= admission._max_running:
            await admission._wait(self._ticket, self._deadline)
        else:
            admission._running += 1
        self._held = True

    def accepted(self) -> None:
        """The workers had room: let the next in line try too."""
        self._admission._grant()

    async def refused(self) -> None:
        """The workers are full: wait in the old place for the next chance.

        Several parts of one request may wait at once; it holds one slot at most.
        """
        if self._held:
            self._held = False
            self._admission._running -= 1
        await self._admission._wait(self._ticket, self._deadline)
        if self._held:
            self._admission._release()
        self._held = True

    def leave(self) -> None:
        if self._held:
            self._held = False
            self._admission._release()
