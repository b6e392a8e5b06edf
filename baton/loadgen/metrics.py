"""The figures of a run, defined as vLLM's `bench serve` defines them (benchmarks/serve.py).

Mean, median and percentiles over the requests that succeeded (all inter-token gaps for ITL);
throughput over the run's whole duration; goodput counts the requests that met every target.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.loadgen.client import Outcome

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Targets:
    """Seconds; None asks for nothing."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @property
    def any(self) -> bool:
        return (self.ttft_s, self.tpot_s, self.e2e_s) != (None, None, None)

    def met(self, outcome: Outcome) -> bool:
        """A request of a single token has no TPOT to miss."""
        seen = (outcome.ttft_s, outcome.tpot_s or 0.0, outcome.latency_s)
        wanted = (self.ttft_s, self.tpot_s, self.e2e_s)
        return outcome.error is None and all(
            limit is None or value <= limit for value, limit in zip(seen, wanted, strict=True)
        )


def percentile(values: Sequence[float], percent: float) -> float:
    """Of sorted values, linear between ranks (numpy's default)."""
    place = (len(values) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def distribution(values: Sequence[float]) -> dict[str, float] | None:
    """In milliseconds; None without values."""
    if not values:
        return None
    ordered = sorted(value * 1e3 for value in values)
    shown = {f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES}
    return {
        "mean": statistics.fmean(ordered),
        "std": statistics.pstdev(ordered),
        "min": ordered[0],
        "max": ordered[-1],
        **shown,
    }


def summarise(outcomes: Sequence[Outcome], duration_s: float, targets: Targets) -> dict[str, Any]:
    good = [outcome for outcome in outcomes if outcome.error is None]
    output = sum(outcome.output_tokens for outcome in good)
    prompt = sum(outcome.prompt_tokens for outcome in good)
    met = sum(targets.met(outcome) for outcome in good)
    tpots = [outcome.tpot_s for outcome in good if outcome.tpot_s is not None]
    return {
        "requests": len(outcomes),
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "duration_s": duration_s,
        "prompt_tokens": prompt,
        "cached_tokens": sum(outcome.cached_tokens for outcome in good),
        "output_tokens": output,
        "request_throughput": len(good) / duration_s,
        "output_throughput": output / duration_s,
        "total_throughput": (prompt + output) / duration_s,
        "goodput": met / duration_s if targets.any else None,
        "attainment": met / len(outcomes) if targets.any and outcomes else None,
        "ttft_ms": distribution([outcome.ttft_s for outcome in good]),
        "tpot_ms": distribution(tpots),
        "itl_ms": distribution([gap for outcome in good for gap in outcome.itl_s]),
        "e2e_ms": distribution([outcome.latency_s for outcome in good]),
        "late_ms": distribution([max(0.0, o.sent_at - o.planned_at) for o in outcomes]),
        "errors": _errors(outcomes),
    }


def _errors(outcomes: Sequence[Outcome], most: int = 10) -> dict[str, int]:
    counts: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.error is not None and (outcome.error in counts or len(counts) < most):
            counts[outcome.error] = counts.get(outcome.error, 0) + 1
    return counts
