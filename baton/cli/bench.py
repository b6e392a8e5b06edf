"""`baton bench`: sends a load to an OpenAI-compatible server and says what a client sees."""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from baton.cluster.errors import BatonError
from baton.loadgen.arrivals import arrival_times
from baton.loadgen.client import CHAT, COMPLETIONS, Outcome, Target
from baton.loadgen.metrics import Targets, summarise
from baton.loadgen.runner import Load, first_model, run
from baton.loadgen.sweep import RateSearch
from baton.loadgen.traces import plan, read_trace
from baton.loadgen.workload import PlannedRequest, synthetic

KIND = "baton-bench"
Endpoint = Literal["completions", "chat"]


@dataclass(frozen=True)
class Bench:
    """What to run. Without `rate` and without a trace's times it is a closed loop."""

    url: str
    model: str | None
    endpoint: Endpoint
    requests: int
    concurrency: int | None
    rate: float | None
    burstiness: float
    trace: Path | None
    scale_length: float
    scale_time: float
    input_tokens: int
    output_tokens: int
    shared_prefix: int
    spread: float
    seed: int
    prompt_as_text: bool
    ignore_eos: bool
    timeout_s: float
    targets: Targets
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def closed(self) -> bool:
        return self.rate is None and self.trace is None

    def load(self) -> Load:
        bound = self.concurrency or (1 if self.closed else 10_000)
        return Load(self.closed, bound, self.timeout_s)

    def plan(self, rate: float | None) -> list[PlannedRequest]:
        if self.trace is not None:
            rows = read_trace(self.trace, self.requests)
            planned = plan(rows, self.scale_length, self.scale_time)
            if rate is None:
                return planned
            times = arrival_times(len(planned), rate, self.burstiness, self.seed)
            return [
                PlannedRequest(at, request.pieces, request.max_tokens, request.text)
                for at, request in zip(times, planned, strict=True)
            ]
        times = [0.0] * self.requests
        if rate is not None:
            times = arrival_times(self.requests, rate, self.burstiness, self.seed)
        lengths = (self.input_tokens, self.output_tokens, self.shared_prefix, self.spread)
        return synthetic(times, *lengths, self.seed)

    def target(self, model: str) -> Target:
        return Target(
            self.url.rstrip("/"),
            model,
            CHAT if self.endpoint == "chat" else COMPLETIONS,
            self.prompt_as_text,
            self.ignore_eos,
            headers=self.headers,
        )


def targets_of(ttft_ms: float | None, tpot_ms: float | None, e2e_ms: float | None) -> Targets:
    """From milliseconds, as people give them."""
    return Targets(*(None if ms is None else ms / 1e3 for ms in (ttft_ms, tpot_ms, e2e_ms)))


def headers_of(given: Sequence[str]) -> dict[str, str]:
    """From lines `NAME: VALUE`."""
    pairs = [line.partition(":") for line in given]
    if wrong := [name for name, colon, _ in pairs if not colon or not name.strip()]:
        raise BatonError(f"--header must be NAME: VALUE, not {wrong[0]!r}.")
    return {name.strip(): value.strip() for name, _, value in pairs}


def bench(bench: Bench, sweep: bool, json_path: Path | None, samples: bool) -> None:
    """Prints the figures; writes them with `json_path`. Raises BatonError when nothing worked."""
    console = Console(stderr=True)
    if json_path is not None:
        json_path.open("a").close()  # better before the run than after it
    result = asyncio.run(_measure(bench, sweep, samples, console))
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    Console().print(sweep_table(result["sweep"]) if sweep else figures_table(result["figures"]))
    if sweep:
        knee = result["knee"]
        found = "no rate met them" if knee is None else f"{knee:.3g} requests/s"
        Console().print(f"knee: {found}")
    if not result["figures"]["completed"]:
        errors = "; ".join(result["figures"]["errors"]) or "nothing was sent"
        raise BatonError(f"No request to {bench.url} succeeded: {errors}")


async def _measure(bench: Bench, sweep: bool, samples: bool, console: Console) -> dict[str, Any]:
    model = bench.model or await first_model(bench.url.rstrip("/"), bench.headers)
    if model is None:
        raise BatonError(f"{bench.url} does not list its models; name one with --model.")
    target = bench.target(model)
    result: dict[str, Any] = {
        "kind": KIND,
        "url": bench.url,
        "model": model,
        "command": " ".join(["baton", *sys.argv[1:]]),
        "started_at": time.time(),
        "settings": _jsonable(asdict(bench)),
    }
    if not sweep:
        figures, outcomes = await _one(bench, target, bench.rate, console)
        rows = [asdict(outcome) for outcome in outcomes] if samples else None
        return {**result, "figures": figures, **({"samples": rows} if rows else {})}
    search = RateSearch(bench.rate or 1.0)
    tried: list[dict[str, Any]] = []
    while (rate := search.next_rate()) is not None:
        figures, _ = await _one(bench, target, rate, console)
        good = search.note(rate, figures)
        tried.append({"rate": rate, "good": good, **figures})
    best = [row for row in tried if row["rate"] == search.knee] or tried[:1]
    tried.sort(key=lambda row: row["rate"])
    return {**result, "figures": best[0], "sweep": tried, "knee": search.knee}


async def _one(
    bench: Bench, target: Target, rate: float | None, console: Console
) -> tuple[dict[str, Any], list[Outcome]]:
    planned = await asyncio.to_thread(bench.plan, rate)
    load = (bench if rate is None else replace(bench, rate=rate)).load()
    outcomes: list[Outcome] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        shown = "closed loop" if load.closed else "trace" if rate is None else f"{rate:.3g}/s"
        task = progress.add_task(shown, total=len(planned))

        def on_outcome(outcome: Outcome) -> None:
            outcomes.append(outcome)
            progress.advance(task)

        duration_s = await run(target, planned, load, on_outcome)
    figures = summarise(outcomes, duration_s, bench.targets)
    if load.closed:
        figures["late_ms"] = None  # nobody is late where nothing has a time
    return figures, outcomes


def figures_table(figures: dict[str, Any]) -> Table:
    table = Table("", "mean", "p50", "p90", "p99", "max", header_style="bold", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, title in _DISTRIBUTIONS:
        if (row := figures[name]) is not None:
            cells = (f"{row[key]:,.2f}" for key in ("mean", "p50", "p90", "p99", "max"))
            table.add_row(f"{title} (ms)", *cells)
    table.add_section()
    failed = f", {figures['failed']} failed" if figures["failed"] else ""
    table.add_row("requests", f"{figures['completed']}{failed}")
    table.add_row("duration (s)", f"{figures['duration_s']:,.2f}")
    for name, title in _RATES:
        if figures[name] is not None:
            table.add_row(title, f"{figures[name]:,.2f}")
    return table


_DISTRIBUTIONS = (
    ("ttft_ms", "TTFT"),
    ("tpot_ms", "TPOT"),
    ("itl_ms", "ITL"),
    ("e2e_ms", "E2E"),
    ("late_ms", "sent late"),
)
_RATES = (
    ("request_throughput", "requests/s"),
    ("output_throughput", "output tokens/s"),
    ("total_throughput", "tokens/s"),
    ("goodput", "goodput (requests/s)"),
    ("attainment", "attainment"),
)


def sweep_table(rows: Sequence[dict[str, Any]]) -> Table:
    titles = ("rate/s", "served/s", "attainment", "goodput/s", "TTFT p50", "TTFT p99", "TPOT p50")
    table = Table(*titles, "", header_style="bold", box=None)
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        ttft, tpot = row["ttft_ms"] or {}, row["tpot_ms"] or {}
        figures = (row["attainment"], row["goodput"])
        table.add_row(
            f"{row['rate']:.3g}",
            f"{row['request_throughput']:.3g}",
            *("" if value is None else f"{value:.3g}" for value in figures),
            *(f"{ttft[key]:,.1f}" if ttft else "" for key in ("p50", "p99")),
            f"{tpot['p50']:,.1f}" if tpot else "",
            "" if row["good"] else "beyond",
        )
    return table


def _jsonable(values: dict[str, Any]) -> dict[str, Any]:
    """Headers may hold a key: their names are enough."""
    shown = {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}
    return {**shown, "headers": sorted(shown["headers"])}
