"""Spans that may overlap become phases that do not: each instant is counted once.

At every instant the span of the lowest rank counts (the earlier one among equals); the others
that are open are marked overlapped. What no span covers is the phase `rpc`: the wire, gRPC and
event loops between the processes. Invariants: the phases that are not overlapped cover
[start, end] without a gap and without meeting each other, and every span keeps its whole length.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Any

GAP = "rpc"


@dataclass(slots=True)
class Span:
    """Work or waiting on the router's clock, in seconds; `where` is a process."""

    name: str
    where: str
    start: float
    end: float
    rank: int
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Phase:
    """A piece of a span; `overlapped` ones run beside the phase that counts."""

    name: str
    where: str
    start: float
    end: float
    overlapped: bool
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def duration(self) -> float:
        return self.end - self.start


def tile(spans: Iterable[Span], start: float, end: float) -> list[Phase]:
    """Phases in order of their start; those that count come before those beside them."""
    inside = [span for span in spans if max(span.start, start) < min(span.end, end)]
    inside.sort(key=_start)
    edges = {start, end}
    for span in inside:
        if span.start > start:
            edges.add(span.start)
        if span.end < end:
            edges.add(span.end)
    phases = _Pieces()
    active: list[Span] = []
    arriving, count = 0, len(inside)
    for left, right in pairwise(sorted(edges)):
        if active:
            active = [span for span in active if span.end > left]
        while arriving < count and inside[arriving].start <= left:
            active.append(inside[arriving])
            arriving += 1
        if len(active) < 2:
            phases.add(active[0] if active else None, left, right, overlapped=False)
            continue
        counted = min(active, key=_precedence)
        for span in active:
            phases.add(span, left, right, overlapped=span is not counted)
    return sorted(phases.made, key=_order)


_start = attrgetter("start")
_precedence = attrgetter("rank", "start")
_order = attrgetter("start", "overlapped")


class _Pieces:
    """Joins neighbouring pieces of one span."""

    def __init__(self) -> None:
        self.made: list[Phase] = []
        self._last: dict[tuple[int, bool], Phase] = {}

    def add(self, span: Span | None, left: float, right: float, *, overlapped: bool) -> None:
        key = (id(span), overlapped)
        last = self._last.get(key)
        if last is not None and last.end == left:
            last.end = right
            return
        if span is None:
            phase = Phase(GAP, "router", left, right, overlapped)
        else:
            phase = Phase(span.name, span.where, left, right, overlapped, span.detail)
        self._last[key] = phase
        self.made.append(phase)
