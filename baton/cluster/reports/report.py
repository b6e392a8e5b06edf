"""From slots to what is shown: figures, phases, misses, rows per worker, series over time.

Times are milliseconds here, as everywhere that people look.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from baton.cluster.ledger.timeline import ORDER
from baton.cluster.reports.group import Group, Key
from baton.cluster.reports.sketch import Sketch
from baton.cluster.reports.window import Slot

KIND = "baton-report"
MS = 1e3


@dataclass(frozen=True)
class Filters:
    """Empty strings let everything through; `worker` matches either role."""

    model: str = ""
    tenant: str = ""
    worker: str = ""

    def match(self, key: Key) -> bool:
        return (
            self.model in ("", key.model)
            and self.tenant in ("", key.tenant)
            and self.worker in ("", key.prefill, key.decode)
        )


def build_report(slots: Sequence[Slot], filters: Filters, now: float) -> dict[str, Any]:
    """`slots` in order of time, of one router or merged from several."""
    everything = _sum(slots, filters)
    seconds = sum(min(slot.end, now) - slot.start for slot in slots)
    return {
        "kind": KIND,
        "from": slots[0].start if slots else now,
        "to": min(slots[-1].end, now) if slots else now,
        "seconds": seconds,
        "filters": vars(filters),
        **_figures(everything, seconds),
        "phases": _named(everything, "phase.", MS),
        "until_first_token": _means(everything, "until_first."),
        "steps": {int(name): row for name, row in _named(everything, "step.", MS).items()},
        "transfer": {
            "bytes": everything.counters["transfer_bytes"],
            "gb_s": _figures_of(everything, "transfer_rate", 1e-9),
        },
        "misses": _misses(everything),
        "workers": _workers(slots, filters, seconds),
        "series": [_point(slot, filters, now) for slot in slots],
    }


def _sum(slots: Iterable[Slot], filters: Filters) -> Group:
    total = Group()
    for slot in slots:
        for key, group in slot.groups.items():
            if filters.match(key):
                total.merge(group)
    return total


def _figures(group: Group, seconds: float) -> dict[str, Any]:
    counters = group.counters
    kept = sum(counters[f"{name}_kept"] for name in ("ttft", "tpot"))
    missed = sum(counters[f"{name}_missed"] for name in ("ttft", "tpot"))
    requests = counters["requests"]
    return {
        "requests": requests,
        "failed": counters["failed"],
        "left": counters["left"],
        "retried": counters["retried"],
        "with_phases": counters["with_phases"],
        "prompt_tokens": counters["prompt_tokens"],
        "cached_tokens": counters["cached_tokens"],
        "hit_rate": _ratio(counters["cached_tokens"], counters["prompt_tokens"]),
        "output_tokens": counters["output_tokens"],
        "request_throughput": _ratio(requests, seconds),
        "output_throughput": _ratio(counters["output_tokens"], seconds),
        "attainment": _ratio(kept, kept + missed),
        "goodput": _ratio(counters["good"], seconds),
        "predicted_ttft_ms": _ratio(counters["predicted_ttft_ms"], counters["predicted"]),
        "predicted_tpot_ms": _ratio(counters["predicted_tpot_ms"], counters["predicted"]),
        "ttft_ms": _figures_of(group, "ttft", MS),
        "tpot_ms": _figures_of(group, "tpot", MS),
        "e2e_ms": _figures_of(group, "e2e", MS),
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _figures_of(group: Group, name: str, factor: float) -> dict[str, float]:
    return group.sketches.get(name, Sketch()).figures(factor)


def _named(group: Group, prefix: str, factor: float) -> dict[str, dict[str, float]]:
    found = {
        name.removeprefix(prefix): sketch.figures(factor)
        for name, sketch in group.sketches.items()
        if name.startswith(prefix)
    }
    return dict(sorted(found.items(), key=lambda item: _place(item[0])))


def _place(name: str) -> tuple[int, str]:
    """Phases as a request goes through them, batch sizes by number."""
    if name.isdigit():
        return int(name), name
    return ORDER.index(name) if name in ORDER else len(ORDER), name


def _means(group: Group, prefix: str) -> dict[str, float]:
    """Mean milliseconds per request with phases; a phase that a request lacks counts as 0."""
    count = group.counters["with_phases"] or 1
    found = {
        name.removeprefix(prefix): sketch.sum * MS / count
        for name, sketch in group.sketches.items()
        if name.startswith(prefix)
    }
    return dict(sorted(found.items(), key=lambda item: _place(item[0])))


def _misses(group: Group) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {"ttft": {}, "tpot": {}}
    for name, count in group.counters.items():
        if name.startswith("miss."):
            _, target, cause = name.split(".")
            found[target][cause] = count
    return found


def _workers(slots: Sequence[Slot], filters: Filters, seconds: float) -> list[dict[str, Any]]:
    roles: list[tuple[str, Callable[[Key], str]]] = [
        ("prefill", lambda key: key.prefill),
        ("decode", lambda key: key.decode),
    ]
    rows = []
    for role, name_of in roles:
        groups: dict[str, Group] = defaultdict(Group)
        for slot in slots:
            for key, group in slot.groups.items():
                if filters.match(key) and name_of(key):
                    groups[name_of(key)].merge(group)
        for name, group in sorted(groups.items()):
            pool = _pool(slots, name)
            rows.append({"worker": name, "role": role, "kv_pool": pool, **_row(group, seconds)})
    return rows


def _row(group: Group, seconds: float) -> dict[str, Any]:
    shown = _figures(group, seconds)
    names = (
        "requests",
        "hit_rate",
        "output_throughput",
        "attainment",
        "ttft_ms",
        "tpot_ms",
        "predicted_ttft_ms",
        "predicted_tpot_ms",
    )
    return {name: shown[name] for name in names}


def _pool(slots: Iterable[Slot], worker: str) -> dict[str, float] | None:
    pools = [slot.pools[worker] for slot in slots if worker in slot.pools]
    samples = sum(pool[1] for pool in pools)
    if not samples:
        return None
    return {"mean": sum(pool[0] for pool in pools) / samples, "max": max(p[2] for p in pools)}


def _point(slot: Slot, filters: Filters, now: float) -> dict[str, Any]:
    seconds = max(min(slot.end, now) - slot.start, 1e-9)
    figures = _figures(_sum([slot], filters), seconds)
    names = (
        "requests",
        "request_throughput",
        "output_throughput",
        "attainment",
        "goodput",
        "hit_rate",
        "ttft_ms",
        "tpot_ms",
    )
    pools = {worker: pool[0] / pool[1] for worker, pool in slot.pools.items()}
    return {"at": slot.start, "kv_pool": pools, **{name: figures[name] for name in names}}
