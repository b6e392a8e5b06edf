"""From trails to spans on the router's clock, each with the rank that `tiling` counts by.

What the router does itself counts before what it waits for; lost attempts before the work that
was lost; computing before moving KV, moving KV before queues. So "exposed" KV transfer is
what neither computing nor the router's own work hides.
"""

import math
from collections.abc import Iterable, Iterator

from baton.cluster.ledger.tiling import Span
from baton.cluster.ledger.trail import CallTrail, Noted, Trail

OWN, LOST, COMPUTE, TRANSFER, WAIT = range(5)
RANKS = {
    "receive": OWN,
    "tokenise": OWN,
    "detokenise": OWN,
    "flush": OWN,
    "client_wait": OWN,
    "retry": LOST,
    "migration": LOST,
    "prefill": COMPUTE,
    "first_decode_step": COMPUTE,
    "decode_step": COMPUTE,
    "recompute": COMPUTE,
    "kv_transfer": TRANSFER,
    "prefill_queue": WAIT,
    "decode_admit": WAIT,
    "decode_wait": WAIT,
    "preempted": WAIT,
    "reserve": WAIT,
    "placement": WAIT,
    "admission": WAIT,
}
"""Every phase but the gaps (`rpc`), by what counts first."""
ORDER = (
    "receive",
    "tokenise",
    "admission",
    "placement",
    "reserve",
    "retry",
    "prefill_queue",
    "prefill",
    "rpc",
    "detokenise",
    "flush",
    "client_wait",
    "kv_transfer",
    "decode_admit",
    "first_decode_step",
    "decode_step",
    "decode_wait",
    "preempted",
    "recompute",
    "migration",
)
"""As a request goes through them."""


_WAITS = {"recompute": "preempted", "prefill": "prefill_queue"}
"""What the time before a step was, by what the step did."""
_TAKEN_UP = ("decode_admit", "first_decode_step")


def spans_of(trails: Iterable[Trail]) -> Iterator[Span]:
    for trail in trails:
        for noted in trail.spans:
            name = noted.name
            yield Span(name, "router", noted.start, noted.end, RANKS[name], noted.detail)
        yield from _deliveries(trail)
        yield from _calls(trail.calls)


def _calls(calls: Iterable[CallTrail]) -> Iterator[Span]:
    """A transfer has ended where decode takes up what it brought, however late its sender hears
    of that: between two steps, what a request waits for is not its transfer."""
    aligned = [(call, list(_call(call))) for call in calls]
    taken_up: dict[int, float] = {}
    for call, spans in aligned:
        start = min((s.start for s in spans if s.name in _TAKEN_UP), default=math.inf)
        if call.role == "decode" and start < math.inf:  # else it was refused, or lost
            taken_up[call.attempt] = max(start, taken_up.get(call.attempt, start))
    for call, spans in aligned:
        # A prefill worker that took over for another has a later attempt than its decode worker.
        attempt = max((a for a in taken_up if a <= call.attempt), default=None)
        end = math.inf if attempt is None else taken_up[attempt]
        for span in spans:
            if span.name != "kv_transfer":
                yield span
            elif span.start < end:  # else its sender has only waited to hear of it
                span.end = min(span.end, end)
                yield span


def _deliveries(trail: Trail) -> Iterator[Span]:
    for received, decoded, rendered, sent in trail.deliveries_by_row():
        yield Span("detokenise", "router", received, decoded, OWN)
        yield Span("flush", "router", decoded, rendered, OWN)
        if sent > rendered:
            yield Span("client_wait", "router", rendered, sent, OWN)


def _call(call: CallTrail) -> Iterator[Span]:
    if not call.clock.known:
        return
    offset = call.clock.offset
    for noted in [*call.spans, *_steps(call)]:
        name, detail = noted.name, noted.detail
        if call.attempt > 1:
            detail = {**detail, "attempt": call.attempt}
        start, end = noted.start - offset, noted.end - offset
        yield Span(name, call.where, start, end, RANKS[name], detail)


def _steps(call: CallTrail) -> Iterator[Noted]:
    """Steps by what they did, and the waits between them, on the worker's clock."""
    decodes, previous_end, previous_context = 0, None, 0.0
    for start, end, batch_size, num_tokens, context, drafted in call.steps_by_row():
        # With drafts, the choices of a request do not grow alike: a shorter one is no recompute.
        again = num_tokens > 1 and not drafted and context - num_tokens < previous_context
        detail = {"batch_size": int(batch_size), "context": int(context)}
        if again:
            name = "recompute"
        elif (num_tokens > 1 and not drafted) or call.role == "prefill":
            name = "prefill"
        else:
            name = "decode_step" if decodes else "first_decode_step"
            decodes += 1
        if previous_end is not None and start > previous_end:
            yield Noted(_WAITS.get(name, "decode_wait"), previous_end, start, {})
        if name != "decode_step" or drafted:
            detail["tokens"] = int(num_tokens)
        if drafted:
            detail["drafted"] = int(drafted)
        yield Noted(name, start, end, detail)
        previous_end, previous_context = end, context
