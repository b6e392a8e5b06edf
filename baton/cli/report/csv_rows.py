"""A report as flat rows: section, name, figure, value."""

from collections.abc import Iterator, Mapping
from typing import Any

HEADER = ("section", "name", "figure", "value")


def rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str, str, Any]]:
    for name, value in report.items():
        if isinstance(value, int | float):
            yield "total", "", name, value
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        yield from _spread("latency", name, report[name])
    for section in ("phases", "steps", "misses"):
        for name, row in report[section].items():
            yield from _spread(section, str(name), row)
    for row in report["workers"]:
        yield from _spread("worker", row["worker"], row)
    for point in report["series"]:
        yield from _spread("series", str(point["at"]), point)


def _spread(section: str, name: str, row: Mapping[str, Any], prefix: str = "") -> Any:
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from _spread(section, name, value, f"{prefix}{key}.")
        elif isinstance(value, int | float):
            yield section, name, prefix + key, value
