"""What the ledger costs, and how well it sums.

Cost: a gateway over scripted workers (no model, so nothing hides it) serves the same requests with
and without everything the ledger notes and folds, in turn; compared by CPU time of the whole
process, which is the throughput of a busy core. Sum: mixed requests to a real `baton up`, each
ledger's total against a stopwatch in this process.

    python bench/ledger.py [--quick] [--json FILE] [--model NAME|PATH]
"""

import asyncio
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from _cluster import running_cluster
from _common import Report, parser

sys.path.insert(0, str(Path(__file__).parents[1]))

from baton.cluster.ledger import Trail
from baton.loadgen.metrics import percentile
from router.ledgers import Ledgers
from tests.support.byte_model import byte_model
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.stopwatch import timed_post
from tests.support.stub_workers import scripted

PATH = "/v1/completions"
TOKENS = 16
AT_ONCE = 16


@contextlib.contextmanager
def without_ledger() -> Iterator[None]:
    """As if it had never been written: nothing is noted, nothing folded."""

    def nothing(*_: object, **__: object) -> None:
        return None

    with (
        mock.patch("router.calls.note", nothing),
        mock.patch.object(Trail, "delivered", nothing),
        mock.patch.object(Trail, "span", nothing),
        mock.patch.object(Ledgers, "add", nothing),
    ):
        yield


async def cpu_s(running: RunningGateway, requests: int) -> float:
    """CPU seconds per request, client and stub workers included."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one() -> None:
        body = {"prompt": "hello", "max_tokens": TOKENS, "stream": True}
        async with gate:
            await timed_post(running.port, PATH, body, "", timing=False)

    begin = time.process_time()
    await asyncio.gather(*(one() for _ in range(requests)))
    return (time.process_time() - begin) / requests


async def overhead(report: Report, rounds: int, requests: int) -> None:
    with_s: list[float] = []
    without_s: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        async with running_gateway(byte_model(Path(folder)), scripted("hello ")) as running:
            await cpu_s(running, requests)
            for number in range(rounds):
                for on in (number % 2 == 0, number % 2 == 1):
                    with contextlib.nullcontext() if on else without_ledger():
                        (with_s if on else without_s).append(await cpu_s(running, requests))
    ours, bare = statistics.median(with_s), statistics.median(without_s)
    report.add("ledger.cpu_us_per_request", (ours - bare) * 1e6, "us")
    report.add("ledger.gateway_share", (ours - bare) / bare, "")


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    shared = rng.choices(range(3, 40_000), k=64)
    lengths = (8, 64, 300)
    return [
        shared * (number % 2) + rng.choices(range(3, 40_000), k=lengths[number % 3])
        for number in range(count)
    ]


async def sums(port: int, count: int) -> tuple[list[float], list[float]]:
    """Absolute errors in ms, and the time of each request in s, one request after the other."""
    errors, took = [], []
    for number, prompt in enumerate(prompts(random.Random(1), count)):
        body = {
            "prompt": prompt,
            "max_tokens": 8,
            "ignore_eos": True,
            "stream": True,
            "n": 1 + number % 2,
        }
        timed = await timed_post(port, PATH, body, f"sum-{number}")
        total = timed.events[-1]["timing"]["total_ms"]
        errors.append(abs(timed.elapsed_s * 1e3 - total))
        took.append(timed.elapsed_s)
    return errors, took


def main() -> None:
    arguments = parser("What the ledger costs, and how well it sums.")
    arguments.add_argument("--model", default="smollm2", help="name in the store, or a path")
    args = arguments.parse_args()
    report = Report("The ledger")
    asyncio.run(overhead(report, 4 if args.quick else 12, 100 if args.quick else 300))
    with running_cluster(args.model) as running:
        port = running.client.base_url.port or 80
        errors, took = asyncio.run(sums(port, 20 if args.quick else 100))
        worker_s = statistics.median(took)
    report.add("ledger.sum_error_ms_p50", percentile(sorted(errors), 50), "ms")
    report.add("ledger.sum_error_ms_p99", percentile(sorted(errors), 99), "ms")
    # Of a served request: throughput is bound by the workers, whose time the ledger does not take.
    per_request_s = next(f.value for f in report.figures if "cpu_us" in f.name) / 1e6
    report.add("ledger.overhead_share", per_request_s / worker_s, "")
    report.finish(args.json)


if __name__ == "__main__":
    main()
