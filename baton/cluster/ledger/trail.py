"""What is noted while a request runs: as little as possible, as cheaply as possible.

A `Trail` belongs to one prompt. The router's own spans and token deliveries are on its clock;
each call to a worker has a `CallTrail`, whose times are on the worker's clock until `timeline`
aligns them. Numbers per token go into flat arrays: 80 bytes a token, no objects.
"""

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from baton.cluster.ledger.clock import ClockOffset

STEP_FIELDS = 6
DELIVERY_FIELDS = 4


class StepLike(Protocol):
    """One engine step as a worker reports it (baton.v1.Step)."""

    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def num_drafted_tokens(self) -> int: ...


@dataclass(slots=True)
class Noted:
    """A span on the clock of the process that noted it. One that was never ended lasts until
    its request ends."""

    name: str
    start: float
    end: float
    detail: dict[str, Any]


class CallTrail:
    """One call to one worker. `sent_at` and `heard_at` are ours, other times the worker's."""

    __slots__ = ("attempt", "clock", "num_cached", "role", "sent_at", "spans", "steps", "where")

    def __init__(self, where: str, role: str, sent_at: float, attempt: int) -> None:
        self.where = where
        self.role = role
        self.sent_at = sent_at
        self.attempt = attempt
        self.clock = ClockOffset()
        self.spans: list[Noted] = []
        self.steps = array("d")
        self.num_cached = 0

    def greeted(self, received_at: float, sent_at: float, heard_at: float) -> None:
        """The worker's first event: when the call reached it and when it answered."""
        self.clock.sent(self.sent_at, received_at)
        self.clock.received(sent_at, heard_at)

    def span(self, name: str, start: float, end: float, **detail: Any) -> None:
        self.spans.append(Noted(name, start, end, detail))

    def step(self, step: StepLike, heard_at: float) -> None:
        end = step.end
        sizes = (step.batch_size, step.num_tokens, step.context, step.num_drafted_tokens)
        self.steps.extend((step.start, end, *sizes))
        if end - heard_at > self.clock.low:
            self.clock.low = end - heard_at

    def steps_by_row(self) -> Iterable[tuple[float, ...]]:
        """(start, end, batch_size, num_tokens, context, num_drafted_tokens) per step."""
        return zip(*[iter(self.steps)] * STEP_FIELDS, strict=True)


class Trail:
    """One prompt of a request: the router's spans, its deliveries, its calls to workers."""

    __slots__ = ("calls", "deliveries", "num_known_tokens", "num_tokens", "spans")

    def __init__(self) -> None:
        self.spans: list[Noted] = []
        self.deliveries = array("d")
        self.num_tokens = 0
        self.num_known_tokens = 0
        """Prompt tokens that the best-matching worker held when the prompt was placed."""
        self.calls: list[CallTrail] = []

    def span(self, name: str, start: float, end: float, **detail: Any) -> None:
        self.spans.append(Noted(name, start, end, detail))

    def begin(self, name: str, start: float) -> Noted:
        """A span whose `end` the caller sets."""
        made = Noted(name, start, math.inf, {})
        self.spans.append(made)
        return made

    def call(self, where: str, role: str, sent_at: float, attempt: int) -> CallTrail:
        made = CallTrail(where, role, sent_at, attempt)
        self.calls.append(made)
        return made

    def delivered(
        self, num_tokens: int, received: float, decoded: float, rendered: float, sent: float
    ) -> None:
        """Tokens of one event: heard, detokenised, made into bytes, taken by the client."""
        self.num_tokens += num_tokens
        self.deliveries.extend((received, decoded, rendered, sent))

    def lost(self, since: float, until: float, where: str, reason: str) -> None:
        """An attempt failed: what it did after its last delivery (or at all) is lost time."""
        name, start = "retry", since
        if self.deliveries and self.deliveries[-1] >= since:
            name, start = "migration", self.deliveries[-1]
        self.span(name, start, until, worker=where, reason=reason)

    @property
    def first_token_at(self) -> float | None:
        return self.deliveries[DELIVERY_FIELDS - 1] if self.deliveries else None

    @property
    def last_token_at(self) -> float | None:
        return self.deliveries[-1] if self.deliveries else None

    def deliveries_by_row(self) -> Iterable[tuple[float, ...]]:
        """(received, decoded, rendered, sent) per event."""
        return zip(*[iter(self.deliveries)] * DELIVERY_FIELDS, strict=True)
