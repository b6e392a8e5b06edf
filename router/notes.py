"""What router and workers note for the ledger while a request runs. Changes no event.

A worker that reports no times (an older one) leaves a gap in the timeline, nothing worse.
"""

import time
from collections.abc import Callable
from typing import Any

from baton.cluster.ledger import CallTrail, Trail
from baton.v1 import decode_pb2, prefill_pb2


class timed:
    """A span of the router's own, however it ends."""

    __slots__ = ("_name", "_start", "_trail")

    def __init__(self, trail: Trail, name: str) -> None:
        self._trail = trail
        self._name = name

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._trail.span(self._name, self._start, time.monotonic())


def note(kind: str | None, event: Any, raw: bytes, trail: CallTrail, heard_at: float) -> None:
    """`event` is a PrefillEvent or a GenerateEvent, `raw` what it was parsed from."""
    if kind == "tokens":  # the common one: hardly anybody will ask for its step
        trail.keep(raw, heard_at)
    elif kind is not None and kind in _NOTES:
        _NOTES[kind](getattr(event, kind), trail, heard_at)


def read_tokens(raw: bytes, trail: CallTrail, heard_at: float) -> None:
    """Of a GenerateEvent that was kept."""
    tokens = decode_pb2.GenerateEvent.FromString(raw).tokens
    if not tokens.HasField("step"):
        return
    step = tokens.step
    if tokens.HasField("ready_at"):
        trail.span("decode_admit", tokens.ready_at, max(step.start, tokens.ready_at))
    trail.step(step, heard_at)


def _reserved(event: decode_pb2.Reserved, trail: CallTrail, heard_at: float) -> None:
    trail.answered = True
    if event.sent_at:
        trail.greeted(event.received_at, event.sent_at, heard_at)


def _started(event: prefill_pb2.PrefillStarted, trail: CallTrail, heard_at: float) -> None:
    trail.answered, trail.num_cached = True, event.num_cached_tokens
    if event.sent_at:
        trail.greeted(event.received_at, event.sent_at, heard_at)
        trail.span("prefill_queue", event.received_at, event.started_at)


def _first_tokens(event: prefill_pb2.FirstTokens, trail: CallTrail, heard_at: float) -> None:
    for step in event.steps:
        trail.step(step, heard_at)


def _done(
    event: prefill_pb2.PrefillDone | decode_pb2.GenerateDone, trail: CallTrail, heard_at: float
) -> None:
    if isinstance(event, decode_pb2.GenerateDone):
        trail.num_cached = event.num_cached_tokens
        return
    *spans, last = event.transfers or (None,)
    for span in spans:
        trail.span("kv_transfer", span.start, span.end)
    if last is not None:
        moved = {"bytes": event.bytes_sent, "blocks": event.blocks_sent}
        trail.span("kv_transfer", last.start, last.end, transport=event.transport, **moved)


_NOTES: dict[str, Callable[[Any, CallTrail, float], None]] = {
    "reserved": _reserved,
    "started": _started,
    "first_tokens": _first_tokens,
    "done": _done,
}
