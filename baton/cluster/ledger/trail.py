"""What is noted while a request runs: as little as possible, as cheaply as possible.

A `Trail` belongs to one prompt. The router's own spans and token deliveries are on its clock;
each call to a worker has a `CallTrail`, whose times are on the worker's clock until `timeline`
aligns them. What comes with every token stays as the bytes that it came in until somebody asks for
steps, spans or clock; it lies in flat arrays: some 80 bytes a token, no objects.
"""

import math
import threading
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from struct import Struct
from typing import Any, Protocol

from baton.cluster.ledger.clock import ClockOffset

STEP_FIELDS = 6
DELIVERY_FIELDS = 4
# Packing is ten times as quick as extending an array by a tuple.
_pack_step = Struct(f"{STEP_FIELDS}d").pack
_pack_delivery = Struct(f"{DELIVERY_FIELDS}d").pack
_pack_mark = Struct("2d").pack


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

    __slots__ = (
        "_clock",
        "_marks",
        "_read",
        "_spans",
        "_steps",
        "_unread",
        "answered",
        "attempt",
        "num_cached",
        "role",
        "sent_at",
        "where",
    )

    def __init__(
        self, where: str, role: str, sent_at: float, attempt: int, read: "Reader | None" = None
    ) -> None:
        self.where = where
        self.role = role
        self.sent_at = sent_at
        self.attempt = attempt
        self.answered = False
        """Whether the worker has taken the call: it may have refused."""
        self.num_cached = 0
        self._read = read
        self._unread = bytearray()  # events, one behind the other
        self._marks = array("d")  # when each was heard, and its length
        self._clock = ClockOffset()
        self._spans: list[Noted] = []
        self._steps = array("d")

    def greeted(self, received_at: float, sent_at: float, heard_at: float) -> None:
        """The worker's first event: when the call reached it and when it answered."""
        self.answered = True
        self._clock.sent(self.sent_at, received_at)
        self._clock.received(sent_at, heard_at)

    def span(self, name: str, start: float, end: float, **detail: Any) -> None:
        self._spans.append(Noted(name, start, end, detail))

    def step(self, step: StepLike, heard_at: float) -> None:
        end = step.end
        sizes = (step.batch_size, step.num_tokens, step.context, step.num_drafted_tokens)
        self._steps.frombytes(_pack_step(step.start, end, *sizes))
        if end - heard_at > self._clock.low:
            self._clock.low = end - heard_at

    def keep(self, event: bytes, heard_at: float) -> None:
        """`read` notes it when somebody asks."""
        self._unread += event
        self._marks.frombytes(_pack_mark(heard_at, len(event)))

    @property
    def num_bytes(self) -> int:
        return len(self._unread) + 8 * (len(self._marks) + len(self._steps))

    @property
    def clock(self) -> ClockOffset:
        self._catch_up()
        return self._clock

    @property
    def spans(self) -> list[Noted]:
        self._catch_up()
        return self._spans

    @property
    def steps(self) -> "array[float]":
        self._catch_up()
        return self._steps

    def _catch_up(self) -> None:
        """The log asks from a thread of its own: the marks go last, so that nobody sees a part."""
        if not self._marks or self._read is None:
            return
        with _reading:
            unread, begin = bytes(self._unread), 0
            for heard_at, length in zip(*[iter(self._marks)] * 2, strict=True):
                end = begin + int(length)
                self._read(unread[begin:end], self, heard_at)
                begin = end
            self._unread, self._marks = bytearray(), array("d")

    def steps_by_row(self) -> Iterable[tuple[float, ...]]:
        """(start, end, batch_size, num_tokens, context, num_drafted_tokens) per step."""
        return zip(*[iter(self.steps)] * STEP_FIELDS, strict=True)


Reader = Callable[[bytes, CallTrail, float], None]
"""Notes an event that was kept, from its bytes and when it was heard."""
_reading = threading.Lock()


class Trail:
    """One prompt of a request: the router's spans, its deliveries, its calls to workers."""

    __slots__ = (
        "accepted",
        "calls",
        "deliveries",
        "longest",
        "num_known_tokens",
        "num_tokens",
        "spans",
    )

    def __init__(self) -> None:
        self.spans: list[Noted] = []
        self.deliveries = array("d")
        self.num_tokens = 0
        self.longest = 0
        """Tokens of the choice that has most."""
        self.num_known_tokens = 0
        """Prompt tokens that the best-matching worker held when the prompt was placed."""
        self.calls: list[CallTrail] = []
        self.accepted = False
        """Whether a worker has begun with it."""

    def span(self, name: str, start: float, end: float, **detail: Any) -> None:
        self.spans.append(Noted(name, start, end, detail))

    def begin(self, name: str, start: float) -> Noted:
        """A span whose `end` the caller sets."""
        made = Noted(name, start, math.inf, {})
        self.spans.append(made)
        return made

    def call(
        self,
        where: str,
        role: str,
        sent_at: float,
        attempt: int,
        read: "Reader | None" = None,
    ) -> CallTrail:
        made = CallTrail(where, role, sent_at, attempt, read)
        self.calls.append(made)
        return made

    def delivered(
        self,
        num_tokens: int,
        received: float,
        decoded: float,
        rendered: float,
        sent: float,
        longest: int | None = None,
    ) -> None:
        """Tokens of one event: heard, detokenised, made into bytes, taken by the client. `longest`:
        of the choice that now has most of all; None: there is one."""
        self.num_tokens += num_tokens
        self.longest = self.num_tokens if longest is None else longest
        self.deliveries.frombytes(_pack_delivery(received, decoded, rendered, sent))

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
