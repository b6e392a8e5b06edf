"""Who goes next: by priority, then fair between tenants, then the earliest feasible deadline. Pure.

Within a priority the tenant that has been given the fewest tokens goes first; one that was idle
starts level with the others, so that it cannot save up (virtual token counter: Sheng et al.,
"Fairness in Serving Large Language Models", OSDI 2024). Within a tenant the earliest deadline
that can still be met goes first (Liu and Layland, 1973); a request without one ranks as if it
were due `PATIENCE_S` after it came. What is late goes behind what is not. One turn in
`OLDEST_EVERY` is of who has waited longest, once that is `PATIENCE_S`: nobody starves, and a
backlog does not make all others late too.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

PATIENCE_S = 10.0
OLDEST_EVERY = 8


@dataclass(eq=False)
class Ticket:
    """A request's claim to its turn; times are on one clock. `tokens`: what it will be given,
    prompt and expected output. `work_s`: what its first token takes once it has its turn."""

    number: int
    arrived_at: float
    tenant: str = ""
    priority: int = 0
    due_at: float = math.inf
    tokens: int = 1
    work_s: float = 0.0
    charged: bool = field(default=False, init=False)

    def urgency(self, now: float) -> tuple[bool, float, int]:
        late = now + self.work_s > self.due_at
        patient_until = self.arrived_at + PATIENCE_S
        return late, patient_until if late else min(self.due_at, patient_until), self.number


class FairQueue:
    """Bounded by its user. `pop` charges the tenant; pushing the ticket again pays it back."""

    def __init__(self) -> None:
        self._waiting: dict[Ticket, None] = {}
        self._given: dict[str, float] = {}
        self._turns = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._waiting

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._waiting)

    def push(self, ticket: Ticket) -> None:
        if ticket.charged:
            self._given[ticket.tenant] = self._given.get(ticket.tenant, 0.0) - ticket.tokens
            ticket.charged = False
            self._turns -= 1
        tenants = {waiting.tenant for waiting in self._waiting}
        if ticket.tenant not in tenants:
            level = min((self._given.get(tenant, 0.0) for tenant in tenants), default=0.0)
            self._given[ticket.tenant] = max(self._given.get(ticket.tenant, 0.0), level)
        self._waiting[ticket] = None

    def remove(self, ticket: Ticket) -> None:
        del self._waiting[ticket]
        self._forget_idle()

    def pop(self, now: float) -> Ticket:
        """The next one; there is one."""
        ticket = self._patient(now) or min(self._waiting, key=partial(self._turn, now))
        self._turns += 1
        del self._waiting[ticket]
        self._given[ticket.tenant] += ticket.tokens
        ticket.charged = True
        self._forget_idle()
        return ticket

    def _patient(self, now: float) -> Ticket | None:
        """Who has waited longest, when this turn is theirs."""
        if self._turns % OLDEST_EVERY:
            return None
        oldest = min(self._waiting, key=lambda ticket: (ticket.arrived_at, ticket.number))
        return oldest if oldest.arrived_at + PATIENCE_S <= now else None

    def _turn(self, now: float, ticket: Ticket) -> tuple[float, ...]:
        return -ticket.priority, self._given[ticket.tenant], *ticket.urgency(now)

    def _forget_idle(self) -> None:
        """With nobody waiting there is nobody to be fair to: counters do not grow for ever."""
        if not self._waiting:
            self._given.clear()
