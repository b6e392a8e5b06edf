"""A report as tables in the terminal."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

SHOWN = ("mean", "p50", "p90", "p99", "max")
LATENCIES = (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("e2e_ms", "E2E"))


def tables(report: Mapping[str, Any]) -> Iterator[Table]:
    yield _totals(report)
    yield _distributions("latency (ms)", {title: report[name] for name, title in LATENCIES})
    title = f"phases that count (ms), {report['with_phases']:.0f} of {report['requests']:.0f}"
    yield _distributions(title, report["phases"])
    if report["steps"]:
        steps = {f"batch {name}": row for name, row in report["steps"].items()}
        yield _distributions("decode step (ms)", steps)
    if any(report["misses"].values()):
        yield _misses(report["misses"])
    yield _workers(report["workers"])


def _table(title: str, *columns: str) -> Table:
    table = Table(title, *columns, box=None, header_style="bold", pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
        column.no_wrap = True
    return table


def _totals(report: Mapping[str, Any]) -> Table:
    table = _table("requests", "failed", "left", "per s", "tokens/s", "hits", "goodput", "attained")
    table.add_row(
        f"{report['requests']:.0f}",
        f"{report['failed']:.0f}",
        f"{report['left']:.0f}",
        number(report["request_throughput"]),
        number(report["output_throughput"]),
        share(report["hit_rate"]),
        number(report["goodput"]),
        share(report["attainment"]),
    )
    return table


def _distributions(title: str, rows: Mapping[str, Mapping[str, float]]) -> Table:
    table = _table(title, *SHOWN)
    for name, row in rows.items():
        if row.get("count"):
            table.add_row(name, *(f"{row[key]:,.2f}" for key in SHOWN))
    return table


def _misses(misses: Mapping[str, Mapping[str, float]]) -> Table:
    table = _table("missed", "cause", "requests")
    for target, causes in misses.items():
        for cause, count in sorted(causes.items(), key=lambda item: -item[1]):
            table.add_row(target.upper(), cause, f"{count:.0f}")
    return table


def _workers(rows: list[dict[str, Any]]) -> Table:
    table = _table("worker", "role", "requests", "TTFT p50", "TPOT p50", "hits", "KV pool")
    for row in rows:
        pool = row["kv_pool"]
        table.add_row(
            row["worker"],
            row["role"],
            f"{row['requests']:.0f}",
            number(row["ttft_ms"].get("p50")),
            number(row["tpot_ms"].get("p50")),
            share(row["hit_rate"]),
            "" if pool is None else f"{pool['mean']:.0%} (max {pool['max']:.0%})",
        )
    return table


def number(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}"


def share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
