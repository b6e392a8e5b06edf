"""Goodput of the slo policy beside the other policies and one colocated pool, on four workloads.

Two prefill and two decode workers, or four colocated ones, run in virtual time (`_sim.py`) around
the router's own placement, predictor and queue, each on a core of its own or on fewer together.
Goodput is requests per second that meet both targets. Each workload is replayed below, at and
above saturation; a ratio is of the goodputs summed over the rates, so that no policy can win by
one lucky rate.

    python bench/slo.py [--quick] [--json FILE] [--traces DIR] [--speed gpu|cpu] [--seed N]
        [--cores N] [--model NAME [--only-real]]

DIR holds the public traces azure2023_conv.csv, azure2023_code.csv and
mooncake_conversation_trace.first5000.jsonl; without it, generated ones with like lengths. Another
seed generates others and takes a later part of the traces: what a policy was not tuned on.
"""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import _slo_real
from _common import Report, parser
from _sim import Simulation
from _sim_workers import SPEEDS, Arrival, Speed, make_workers

from baton.loadgen.traces import MOONCAKE_BLOCK, read_trace
from baton.store import StoreError, resolve
from router.placement import Rules
from router.predictor import Phase
from router.targets import Targets

# Four times what a lone prompt of 2,048 tokens takes, and six times its decode step.
TARGETS = {"gpu": Targets(ttft_s=1.0, tpot_s=0.05), "cpu": Targets(ttft_s=3.5, tpot_s=0.15)}
POLICIES = ("slo", "round_robin", "least_loaded", "prefix", "power_of_two")
WORKERS = 4
REAL_ROUNDS = 3
RATES = (0.7, 0.9, 1.1)
MOONCAKE_SCALE = 1 / 16
GENERATED_BLOCK = 64
# Blocks of the prefix cache of one worker, about 65,000 tokens.
CACHE_TOKENS = 65_536


Load = Callable[[Path, int, int], list[Arrival]]
"""From a folder of traces, how many, and a seed."""


def azure(name: str) -> Load:
    def load(folder: Path, count: int, seed: int) -> list[Arrival]:
        rows = read_trace(folder / f"azure2023_{name}.csv", count * (seed + 1))[-count:]
        return [Arrival(row.at_s, row.input_tokens, row.output_tokens) for row in rows]

    return load


def mooncake(folder: Path, count: int, seed: int) -> list[Arrival]:
    """Lengths and blocks divided by 16."""
    trace = folder / "mooncake_conversation_trace.first5000.jsonl"
    rows = read_trace(trace, count * (seed + 1))[-count:]
    rng = random.Random(seed)
    return [
        Arrival(
            row.at_s + rng.uniform(0, 3),  # the recorded times are rounded to 3 s
            max(1, round(row.input_tokens * MOONCAKE_SCALE)),
            max(1, round(row.output_tokens * MOONCAKE_SCALE)),
            row.blocks,
        )
        for row in rows
    ]


def generated(mean_input: float, mean_output: float) -> Load:
    """Poisson arrivals with log-normal lengths, for when there is no trace."""

    def load(_: Path, count: int, seed: int) -> list[Arrival]:
        rng, now, arrivals = random.Random(1 + seed), 0.0, []
        for _ in range(count):
            now += rng.expovariate(1.0)
            sizes = [
                max(1, min(16_000, round(mean * rng.lognormvariate(-0.5, 1.0))))
                for mean in (mean_input, mean_output)
            ]
            arrivals.append(Arrival(now, *sizes))
        return arrivals

    return load


def prefix_heavy(_: Path, count: int, seed: int) -> list[Arrival]:
    """Sixty long system prompts, some much more popular, short questions, in bursts. One
    worker's cache holds half of them."""
    rng, now, arrivals = random.Random(2 + seed), 0.0, []
    for number in range(count):
        now += rng.expovariate(0.3 if rng.random() < 0.3 else 3.0)
        topic = min(int(rng.paretovariate(0.5)) - 1, 59)
        shared = tuple(1000 * topic + block for block in range(32))
        private = rng.randint(32, 256)
        blocks = (*shared, *(-1 - 10 * number - b for b in range(private // GENERATED_BLOCK)))
        size = len(shared) * GENERATED_BLOCK + private
        arrivals.append(Arrival(now, size, rng.randint(20, 120), blocks))
    return arrivals


def at_rate(
    arrivals: list[Arrival], part: float, speed: Speed, block: int, cores: int = WORKERS
) -> list[Arrival]:
    """Times stretched so that the cores of four workers, each of them free to do anything and with
    every prefix seen before cached, are busy for `part` of the time."""
    work_s, seen = 0.0, set[int]()
    for arrival in arrivals:
        cached = min(sum(b in seen for b in arrival.blocks) * block, arrival.input_tokens - 1)
        seen.update(arrival.blocks)
        uncached = arrival.input_tokens - cached
        work_s += speed.step_s * -(-uncached // 512) + speed.token_s * uncached
        token_s = speed.step_s / 24 + speed.sequence_s + speed.context_s * arrival.input_tokens
        work_s += arrival.output_tokens * token_s
    first = arrivals[0].at_s
    factor = work_s / cores / part / (arrivals[-1].at_s - first)
    return [replace(a, at_s=(a.at_s - first) * factor) for a in arrivals]


def goodput(
    arrivals: list[Arrival], policy: str, speed: str, block_tokens: int, cores: int = WORKERS
) -> tuple[float, Simulation]:
    """Requests per second that met both targets."""
    colocated, targets = policy == "colocated", TARGETS[speed]
    pools = (0, WORKERS) if colocated else (2, WORKERS - 2)
    workers = make_workers(*pools, SPEEDS[speed], CACHE_TOKENS // block_tokens, cores=cores)
    name = "least_loaded" if colocated else policy
    simulation = Simulation(workers, name, targets, Rules("auto"), block_tokens)
    requests = simulation.run(arrivals)
    if not all(math.isfinite(request.ended_at) for request in requests):
        raise SystemExit(f"{policy}: a request never ended")
    met = sum(request.met(targets) for request in requests)
    return met / arrivals[-1].at_s, simulation


def compare(
    report: Report, name: str, arrivals: list[Arrival], speed: str, block_tokens: int, cores: int
) -> None:
    totals: dict[str, float] = {}
    for part in RATES:
        load = at_rate(arrivals, part, SPEEDS[speed], block_tokens, cores)
        offered = len(load) / load[-1].at_s
        for policy in (*POLICIES, "colocated"):
            found, _ = goodput(load, policy, speed, block_tokens, cores)
            totals[policy] = totals.get(policy, 0.0) + found
            if policy in ("slo", "colocated"):
                key = f"slo.attainment.{policy}.{name}.{round(part * 100)}"
                report.add(key, min(found / offered, 1.0), "share")
    report.add(f"slo.goodput.{name}", totals["slo"] / len(RATES), "requests/s")
    for policy in (*POLICIES[1:], "colocated"):
        if not totals[policy]:
            continue  # nothing was in time: no ratio
        report.add(f"slo.goodput.vs_{policy}.{name}", totals["slo"] / totals[policy], "x")


def main() -> None:
    arguments = parser("Goodput of the slo policy against others, in virtual time.")
    arguments.add_argument("--traces", type=Path, metavar="DIR", help="folder of public traces")
    arguments.add_argument("--speed", choices=SPEEDS, default="gpu", help="service times")
    arguments.add_argument(
        "--cores", type=int, choices=range(1, WORKERS + 1), default=WORKERS, help="of the workers"
    )
    arguments.add_argument("--seed", type=int, default=0, help="other workloads of the same kind")
    arguments.add_argument("--model", help="also on real workers with this model")
    arguments.add_argument("--only-real", action="store_true", help="leave virtual time out")
    args = arguments.parse_args()
    if args.model:
        _check(args.model)
    report = Report("Goodput under latency targets")
    if not args.only_real:
        count = 300 if args.quick else 1200
        _virtual(report, args.traces, args.speed, args.seed, count, args.cores)
    if args.model:
        count, rounds = (60, 1) if args.quick else (200, REAL_ROUNDS)
        loads = [prefix_heavy(Path(), count, args.seed + 100 * n) for n in range(rounds)]
        _slo_real.compare(report, args.model, list(map(_quartered, loads)), GENERATED_BLOCK // 4)
    report.finish(args.json)


def _check(model: str) -> None:
    """A wrong name is said before minutes of virtual time."""
    try:
        resolve(model)
    except StoreError as error:
        raise SystemExit(str(error)) from error


def _virtual(
    report: Report, traces: Path | None, speed: str, seed: int, count: int, cores: int
) -> None:
    recorded = traces is not None
    workloads: dict[str, tuple[Load, int]] = {
        "azure_conv": (azure("conv") if recorded else generated(1155, 211), 64),
        "azure_code": (azure("code") if recorded else generated(2048, 28), 64),
        "mooncake": (
            mooncake if recorded else generated(817, 22),
            round(MOONCAKE_BLOCK * MOONCAKE_SCALE),
        ),
        "prefix": (prefix_heavy, GENERATED_BLOCK),
    }
    for name, (load, block_tokens) in workloads.items():
        compare(report, name, load(traces or Path(), count, seed), speed, block_tokens, cores)
    arrivals = at_rate(prefix_heavy(Path(), 250, seed), 0.5, SPEEDS[speed], GENERATED_BLOCK, cores)
    _, simulation = goodput(arrivals, "slo", speed, GENERATED_BLOCK, cores)
    for phase in Phase:
        report.add(f"predictor.mape.{phase}", simulation.predictor.mape(phase) or 0.0, "share")


def _quartered(arrivals: list[Arrival]) -> list[Arrival]:
    """At a quarter of their lengths, for small machines."""
    return [
        replace(a, input_tokens=a.input_tokens // 4, output_tokens=max(2, a.output_tokens // 4))
        for a in arrivals
    ]


if __name__ == "__main__":
    main()
