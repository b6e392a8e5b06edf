"""One bounded queue in front of the workers.

Owns how many requests run, and gives the next one in line its turn; in which order they stand
is the fair queue's business, and whether there is room the workers'. A request that the workers
refuse for lack of room goes back to its old place, and the bound, which is for newcomers, does not
stop one that had its turn or whose answer has begun. Whoever arrives while others wait queues up.
The next in line is let through when a request ends, when one was accepted (there may be more
room) and when workers changed. Invariant: running + waiting requests are bounded; every wait
ends at its deadline.
"""

import asyncio
import itertools
from dataclasses import replace
from typing import NamedTuple, Self

from baton.cluster.errors import Overloaded
from router.fair_queue import FairQueue, Ticket

RETRY_AFTER_S = 1.0


class QueueFull(Overloaded):
    """The queue holds as many as it may."""


class QueueTimeout(Overloaded):
    """The deadline passed before there was room."""


class Claim(NamedTuple):
    """What a request's turn depends on; see `Ticket`. None: it comes now, without a deadline."""

    tenant: str = ""
    priority: int = 0
    arrived_at: float | None = None
    due_at: float | None = None
    tokens: int = 1
    work_s: float = 0.0


ORDINARY = Claim()


class Admission:
    def __init__(self, max_running: int, max_queue: int) -> None:
        self._max_running = max_running
        self._max_queue = max_queue
        self._running = 0
        self._numbers = itertools.count()
        self._queue = FairQueue()
        self._turns: dict[Ticket, asyncio.Future[None]] = {}

    @property
    def running(self) -> int:
        return self._running

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def work_s(self) -> float:
        """Prefill seconds of those who wait."""
        return sum(ticket.work_s for ticket in self._queue)

    def slot(self, deadline: float, claim: Claim = ORDINARY) -> "Slot":
        """A running slot, held as a context; `deadline` (event loop time) bounds the waits for
        room."""
        now = asyncio.get_running_loop().time()
        ticket = Ticket(
            next(self._numbers),
            now if claim.arrived_at is None else claim.arrived_at,
            claim.tenant,
            claim.priority,
            float("inf") if claim.due_at is None else claim.due_at,
            claim.tokens,
            claim.work_s,
        )
        return Slot(self, ticket, deadline)

    def workers_changed(self) -> None:
        """A worker came, went or reported another load: somebody may fit now."""
        self._grant()

    def _grant(self) -> None:
        while self._queue and self._running < self._max_running:
            turn = self._turns.pop(self._queue.pop(asyncio.get_running_loop().time()))
            if not turn.done():
                self._running += 1
                turn.set_result(None)
                return

    def _check_bound(self) -> None:
        if len(self._queue) >= self._max_queue:
            raise QueueFull("The queue is full, try again later.", retry_after_s=RETRY_AFTER_S)

    async def _wait(self, ticket: Ticket, deadline: float) -> None:
        turn = self._turns[ticket] = asyncio.get_running_loop().create_future()
        self._queue.push(ticket)
        try:
            async with asyncio.timeout_at(deadline):
                await turn
        except BaseException as error:
            self._abandon(ticket, turn)
            if isinstance(error, TimeoutError):
                raise QueueTimeout(
                    "No room on the workers within the time a request may queue.",
                    retry_after_s=RETRY_AFTER_S,
                ) from error
            raise

    def _abandon(self, ticket: Ticket, turn: asyncio.Future[None]) -> None:
        if ticket in self._queue:
            self._queue.remove(ticket)
            del self._turns[ticket]
        elif turn.done() and not turn.cancelled():
            self._release()  # it was granted in the same moment

    def _release(self) -> None:
        self._running -= 1
        self._grant()


class Slot:
    """One request's place: waiting, running or gone."""

    def __init__(self, admission: Admission, ticket: Ticket, deadline: float) -> None:
        self._admission = admission
        self._ticket = ticket
        self._deadline = deadline
        self._held = False

    async def __aenter__(self) -> Self:
        admission = self._admission
        if admission._queue or admission._running >= admission._max_running:
            admission._check_bound()
            await admission._wait(self._ticket, self._deadline)
        else:
            admission._running += 1
        self._held = True
        return self

    def accepted(self) -> None:
        """The workers had room: let the next in line try too."""
        self._admission._grant()

    async def refused(self, deadline: float | None = None) -> None:
        """The workers are full: wait in the old place for the next chance, until the slot's own
        deadline, or, for what goes on with an answer that has begun, until another one.

        Several parts of one request may wait at once; it holds one slot at most.
        """
        if self._held:
            self._held = False
            self._admission._running -= 1
        if deadline is None and not self._ticket.charged:
            self._admission._check_bound()
        alone = self._ticket not in self._admission._queue
        ticket = self._ticket if alone else replace(self._ticket)
        await self._admission._wait(ticket, self._deadline if deadline is None else deadline)
        if self._held:
            self._admission._release()
        self._held = True

    async def __aexit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        if self._held:
            self._held = False
            self._admission._release()
