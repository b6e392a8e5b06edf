"""What every benchmark shares: its arguments, its figures, how they are shown and saved.

A figure is a dot path, a number and a unit. Rivals are timed in turn, round by round, so that a
busy machine slows all of them alike and their ratio stays true.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

# The folder of a script comes first in the path, an editable install last: bench/router.py would
# hide the router's package.
if Path(sys.path[0]).resolve() == Path(__file__).parent:
    sys.path.append(sys.path.pop(0))
    sys.path.insert(0, str(Path(__file__).parents[1]))


@dataclass(frozen=True)
class Figure:
    name: str
    value: float
    unit: str


@dataclass
class Report:
    title: str
    figures: list[Figure] = field(default_factory=list)

    def add(self, name: str, value: float, unit: str) -> None:
        self.figures.append(Figure(name, float(f"{value:.5g}"), unit))

    def add_ratio(self, name: str, ours_s: float, theirs_s: float) -> None:
        """How many times as fast as theirs we are: above 1 is better."""
        self.add(name, theirs_s / ours_s, "x")

    def finish(self, json_path: Path | None) -> None:
        """Shows the table; writes the JSON if a path is given."""
        table = Table(title=self.title)
        table.add_column("figure")
        table.add_column("value", justify="right")
        table.add_column("unit")
        for figure in self.figures:
            table.add_row(figure.name, f"{figure.value:,.4g}", figure.unit)
        Console().print(table)
        if json_path is not None:
            json_path.write_text(json.dumps(self.as_json(), indent=2) + "\n", encoding="utf-8")

    def as_json(self) -> dict[str, Any]:
        return {
            "figures": [asdict(figure) for figure in self.figures],
            "machine": machine(),
            "commit": commit(),
            "command": " ".join(["python", *sys.argv]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }


def parser(description: str) -> argparse.ArgumentParser:
    """With the two flags that every benchmark has."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    result.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    return result


def alternate(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each run, warmed once, taken in turn."""
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name].append(timed(run))
    return {name: statistics.median(values) for name, values in seconds.items()}


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def commit() -> str:
    """The checked-out commit, marked when files differ from it; "unknown" outside git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    folder = Path(__file__).parent
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10)
    return result.stdout.strip() or "unknown"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
