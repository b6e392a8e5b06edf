"""Two reports, or two benchmark results, side by side with their ratio."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

FIGURES = (
    ("requests", "requests"),
    ("request_throughput", "requests/s"),
    ("output_throughput", "output tokens/s"),
    ("goodput", "goodput (requests/s)"),
    ("attainment", "attainment"),
    ("hit_rate", "prefix hit rate"),
)
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
PERCENTS = ("mean", "p50", "p90", "p99")


def rows(one: Mapping[str, Any], two: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """`figure`, `a`, `b` and `ratio` (b over a) of whatever both have."""
    a, b = one.get("figures", one), two.get("figures", two)
    for name, title in FIGURES:
        yield from _row(title, a.get(name), b.get(name))
    for name in LATENCIES:
        for key in PERCENTS:
            title = f"{name.removesuffix('_ms').upper()} {key} (ms)"
            yield from _row(title, (a.get(name) or {}).get(key), (b.get(name) or {}).get(key))
    phases = a.get("phases", {}).keys() & b.get("phases", {}).keys()
    for phase in sorted(phases):
        means = (side["phases"][phase].get("mean") for side in (a, b))
        yield from _row(f"phase {phase} mean (ms)", *means)
    knees = one.get("knee"), two.get("knee")
    yield from _row("knee (requests/s)", *knees)


def _row(title: str, a: float | None, b: float | None) -> Iterator[dict[str, Any]]:
    if a is not None and b is not None:
        yield {"figure": title, "a": a, "b": b, "ratio": b / a if a else None}


def table(one: Mapping[str, Any], two: Mapping[str, Any], names: tuple[str, str]) -> Table:
    shown = Table("", *names, "B / A", box=None, header_style="bold", pad_edge=False)
    for column in shown.columns[1:]:
        column.justify = "right"
    for row in rows(one, two):
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}×"
        shown.add_row(row["figure"], f"{row['a']:,.2f}", f"{row['b']:,.2f}", ratio)
    return shown
