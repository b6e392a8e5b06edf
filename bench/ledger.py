"""What the ledger costs, and how well it sums.

Cost: a router process whose ledger is switched off and on in turn serves the same requests. Over
scripted workers (no model, so nothing hides it) by its own CPU time, which is the throughput of a
busy core; over a real `baton up` by tokens per second as clients see them. Sum: mixed requests to
that cluster, each ledger's total against a stopwatch in this process.

    python bench/ledger.py [--quick] [--json FILE] [--model NAME|PATH]
"""

import asyncio
import contextlib
import random
import signal
import statistics
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import _gateway
from _cluster import running_cluster
from _common import Report, parser

from baton.cluster.redis_server import EmbeddedRedis
from baton.cluster.reports.collector import SHARE
from baton.loadgen.metrics import percentile
from tests.support.stopwatch import timed_post

PATH = "/v1/completions"
ROUTER = str(Path(__file__).with_name("_switched_router.py"))
TOKENS = 32
AT_ONCE = 8
Router = subprocess.Popen[str]


@contextlib.asynccontextmanager
async def switched_router(
    redis_url: str, share: float, *flags: str
) -> AsyncIterator[tuple[int, Router]]:
    """`share` of a core may go into timelines."""
    port, flags = _gateway.free_port(), (str(share), *flags)
    with _gateway.process(ROUTER, *flags, *_gateway.router_flags(port, redis_url)) as router:
        await _gateway.until_ready(port)
        yield port, router


async def in_turn(
    router: Router, rounds: int, measure: Callable[[], Awaitable[float]]
) -> tuple[list[float], list[float]]:
    """What is measured with the ledger and without, round by round, warmed once."""
    found: dict[bool, list[float]] = {True: [], False: []}
    await measure()
    for number in range(rounds):
        for on in (number % 2 == 0, number % 2 == 1):
            router.send_signal(signal.SIGUSR2 if on else signal.SIGUSR1)
            found[on].append(await measure())
    router.send_signal(signal.SIGUSR2)
    return found[True], found[False]


def shares(ours: list[float], bare: list[float]) -> tuple[float, float]:
    """Median over the rounds of what is added, as a share, and its standard error."""
    ratios = [one / other - 1 for one, other in zip(ours, bare, strict=True)]
    return statistics.median(ratios), 1.25 * statistics.stdev(ratios) / len(ratios) ** 0.5


async def gateway_cost(report: Report, rounds: int, requests: int) -> None:
    """Of the router's own CPU time, over workers that only answer. What goes into timelines is a
    share of time, not of requests, so it is left out and added."""
    async with (
        _gateway.stub_cluster() as (url, _, _),
        switched_router(url, 0.0) as (port, router),
    ):
        ours, bare = await in_turn(router, rounds, lambda: _gateway.cpu_s(port, router, requests))
    share, error = shares(ours, bare)
    report.add("ledger.cpu_us_per_request", share * statistics.median(bare) * 1e6, "us")
    report.add("ledger.gateway_share", share + SHARE, "")
    report.add("ledger.gateway_share_error", error, "")


async def seconds_for(port: int, requests: int) -> float:
    """Wall clock of so many requests, a few at once."""
    left = iter(range(requests))

    async def client() -> None:
        for number in left:
            body = {
                "prompt": [number % 1000 + 3] * 32,
                "max_tokens": TOKENS,
                "ignore_eos": True,
                "stream": True,
            }
            await timed_post(port, PATH, body, "", timing=False)

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return time.perf_counter() - begin


async def cluster_cost(report: Report, model: str, rounds: int, requests: int) -> None:
    """Of the throughput that clients of a real cluster see; and how ledgers of it sum."""
    redis = EmbeddedRedis()
    url = await redis.start()
    try:
        with running_cluster(model, "--redis", url):
            async with switched_router(url, SHARE, "--model", model) as (port, router):
                ours, bare = await in_turn(router, rounds, lambda: seconds_for(port, requests))
                errors = await sums(port, requests)
    finally:
        await redis.stop()
    share, error = shares(ours, bare)
    report.add("ledger.cluster_tok_s", TOKENS * requests / statistics.median(ours), "tokens/s")
    report.add("ledger.overhead_share", share, "")
    report.add("ledger.overhead_share_error", error, "")
    report.add("ledger.sum_error_ms_p50", percentile(sorted(errors), 50), "ms")
    report.add("ledger.sum_error_ms_p99", percentile(sorted(errors), 99), "ms")


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    shared = rng.choices(range(3, 40_000), k=64)
    lengths = (8, 64, 300)
    return [
        shared * (number % 2) + rng.choices(range(3, 40_000), k=lengths[number % 3])
        for number in range(count)
    ]


async def sums(port: int, count: int) -> list[float]:
    """Absolute errors in ms, one request after the other."""
    errors = []
    for number, prompt in enumerate(prompts(random.Random(1), count)):
        body = {
            "prompt": prompt,
            "max_tokens": 8,
            "ignore_eos": True,
            "stream": True,
            "n": 1 + number % 2,
        }
        timed = await timed_post(port, PATH, body, f"sum-{number}")
        errors.append(abs(timed.elapsed_s * 1e3 - timed.events[-1]["timing"]["total_ms"]))
    return errors


def main() -> None:
    arguments = parser("What the ledger costs, and how well it sums.")
    arguments.add_argument("--model", default="smollm2", help="name in the store, or a path")
    args = arguments.parse_args()
    report = Report("The ledger")
    rounds, requests = (8, 100) if args.quick else (24, 300)
    asyncio.run(gateway_cost(report, rounds, requests))
    asyncio.run(cluster_cost(report, args.model, rounds, 24 if args.quick else 64))
    report.finish(args.json)


if __name__ == "__main__":
    main()
