"""Why a target was missed: the cause whose removal would have met it. Pure arithmetic.

The time until the first token (for TTFT), or from there to the last one (for TPOT), is split by
cause; a cause is named when the request would have met its target without that time. When no
single one suffices the largest is named, and said not to suffice.
"""

from collections.abc import Callable, Iterable

from baton.cluster.ledger.ledger import Ledger
from baton.cluster.ledger.miss import Miss
from baton.cluster.ledger.tiling import Phase

CAUSES = (
    "admission_queue",
    "prefill_queue",
    "cold_prefix",
    "long_prompt",
    "transfer",
    "decode_batch",
    "preemption",
    "retry",
    "slow_client",
    "router",
    "model",
)
_OF_PHASE = {
    "admission": "admission_queue",
    "prefill_queue": "prefill_queue",
    "kv_transfer": "transfer",
    "decode_admit": "decode_batch",
    "decode_wait": "decode_batch",
    "preempted": "preemption",
    "recompute": "preemption",
    "retry": "retry",
    "migration": "retry",
    "client_wait": "slow_client",
}


def misses(ledger: Ledger, alone_step_s: Callable[[str], float | None]) -> list[Miss]:
    """`alone_step_s(worker)`: how long one of its decode steps takes in the smallest batch seen;
    what a step takes beyond that is the batch's doing. None when unknown: then all of it is the
    model's."""
    found = []
    ttft, tpot = ledger.ttft_s, ledger.tpot_s
    if ledger.ttft_target_s is not None and ttft is not None and ttft > ledger.ttft_target_s:
        until = ledger.started + ttft
        phases = (phase for phase in ledger.phases if phase.end <= until + 1e-9)
        shares = _shares(ledger, phases, alone_step_s)
        found.append(_named("ttft", ledger.ttft_target_s, ttft, ttft, shares))
    if ledger.tpot_target_s is not None and tpot is not None and tpot > ledger.tpot_target_s:
        after = ledger.started + (ttft or 0.0)
        phases = (phase for phase in ledger.phases if phase.start >= after - 1e-9)
        shares = _shares(ledger, phases, alone_step_s)
        decoding = sum(shares.values())
        allowed = decoding * ledger.tpot_target_s / tpot
        found.append(_named("tpot", ledger.tpot_target_s, tpot, decoding, shares, allowed))
    return found


def _named(
    target: str,
    target_s: float,
    seen_s: float,
    total_s: float,
    shares: dict[str, float],
    allowed_s: float | None = None,
) -> Miss:
    """The model itself is named only where nothing else was in the way."""
    excess = total_s - (target_s if allowed_s is None else allowed_s)
    removable = {name: share for name, share in shares.items() if name != "model"}
    cause = max(removable, key=lambda name: removable[name], default="model")
    if sum(removable.values()) < excess:
        cause = "model"
    return Miss(target, target_s, seen_s, cause, shares.get(cause, 0.0) >= excess, shares)


def _shares(
    ledger: Ledger, phases: Iterable[Phase], alone_step_s: Callable[[str], float | None]
) -> dict[str, float]:
    shares: dict[str, float] = {}
    for phase in phases:
        if phase.overlapped:
            continue
        for cause, seconds in _split(ledger, phase, alone_step_s):
            if seconds > 0:
                shares[cause] = shares.get(cause, 0.0) + seconds
    return shares


def _split(
    ledger: Ledger, phase: Phase, alone_step_s: Callable[[str], float | None]
) -> Iterable[tuple[str, float]]:
    if phase.detail.get("attempt", 1) > 1:
        return [("retry", phase.duration)]  # done once already
    if phase.name == "prefill":
        # Of the tokens computed here, those that another worker held were cold for no need.
        cold = phase.duration * ledger.known_share
        return [("cold_prefix", cold), ("long_prompt", phase.duration - cold)]
    if phase.name in ("first_decode_step", "decode_step"):
        alone = alone_step_s(phase.where)
        own = phase.duration if alone is None else min(alone, phase.duration)
        return [("model", own), ("decode_batch", phase.duration - own)]
    return [(_OF_PHASE.get(phase.name, "router"), phase.duration)]
