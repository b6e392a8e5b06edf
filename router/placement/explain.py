"""A decision in numbers that a person can check: what was chosen, and what else there was."""

import math
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from router.placement.cost import Plan
from router.placement.facts import Candidate, RequestFacts
from router.placement.options import Options, Rules
from router.placement.slo import Slo
from router.predictor import Predictor
from router.targets import Targets

SHOWN = 8
_TIMES = ("waited", "admit", "queue", "prefill", "transfer", "ttft", "tpot", "harm", "total")
_times_of = attrgetter(*(f"{name}_s" for name in _TIMES))
_MILLIS = [f"{name}_ms" for name in _TIMES]
_COUNTS = ("cached_tokens", "uncached_tokens", "transfer_bytes", "others", "free_blocks")
_counts_of = attrgetter(*_COUNTS)


def alternatives(
    request: RequestFacts, candidates: Iterable[Candidate], predictor: Predictor, rules: Rules
) -> list[Plan]:
    """The ways that the slo policy compares, best first."""
    options = Options(request, candidates, predictor, rules)
    return sorted(Slo().plans(options), key=lambda plan: plan.rank)[:SHOWN]


def explained(
    policy: str, targets: Targets, chosen: Plan, others: Sequence[Plan]
) -> dict[str, Any]:
    """As JSON. Times are in milliseconds, null for a target that was not set."""
    return {
        "policy": policy,
        "targets": {
            "ttft_ms": _millis(targets.ttft_s),
            "tpot_ms": _millis(targets.tpot_s),
            "policy": "reject" if targets.reject else "best_effort",
            "priority": targets.priority,
        },
        "chosen": _plan(chosen),
        "alternatives": [_plan(plan) for plan in others if not _same(plan, chosen)],
    }


def foreseen(chosen: Plan | None, others: Sequence[Plan]) -> dict[str, Any] | None:
    """What was predicted of the chosen plan and, where several were compared, of the next best."""
    if chosen is None:
        return None
    other = next((plan for plan in others if not _same(plan, chosen)), chosen.other)
    return {"chosen": _plan(chosen), "other": other and _plan(other)}


def _plan(plan: Plan) -> dict[str, Any]:
    times = map(_millis, _times_of(plan.cost))
    return {
        "prefill": plan.prefill and plan.prefill.worker_id,
        "decode": plan.decode and plan.decode.worker_id,
        "meets_targets": plan.miss == 0,
        "miss": round(plan.miss, 4),
        **dict(zip(_MILLIS, times, strict=True)),
        **dict(zip(_COUNTS, _counts_of(plan.cost), strict=True)),
    }


def _same(one: Plan, other: Plan) -> bool:
    return (one.prefill, one.decode) == (other.prefill, other.decode)


def _millis(seconds: float) -> float | None:
    return None if math.isinf(seconds) else round(seconds * 1e3, 3)
