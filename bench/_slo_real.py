"""The prefix-heavy workload on real workers with a real model: goodput by policy, and how far the
router's predictions are off.

The cluster says itself what it can do: prompts that are alone give the targets, a closed loop the
rates, both once and before any policy runs. So a slow machine is loaded as much as a fast one.
"""

import asyncio
import contextlib
import itertools
import math
import random
import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import _gateway
import httpx
from _cluster import running_cluster
from _common import Report
from _hindsight import least_mape, read_samples
from _sim_workers import Arrival

from baton.cluster.redis_server import EmbeddedRedis
from router.predictor import Phase
from router.targets import Targets

ROUTER = str(Path(__file__).with_name("_recorded_router.py"))
VOCABULARY = range(3, 40_000)
POLICIES = ("slo", "round_robin", "least_loaded", "prefix", "colocated")
COSTS = {Phase.PREFILL: 5, Phase.DECODE: 3, Phase.TRANSFER: 2}
LOADS = (0.5, 0.8)
"""Parts of the capacity; each is offered the like share of the requests."""
TTFT_SCALE, TPOT_SCALE = 2.5, 2.5
"""Targets, in times of what a request takes that is alone."""
MEMORY = ("--kv-memory", "128MiB")
WARM_UPS, ALONE, AT_ONCE = 4, 8, 16


@dataclass(frozen=True)
class Outcome:
    ttft_s: float
    tpot_s: float

    def met(self, targets: Targets) -> bool:
        return self.ttft_s <= targets.ttft_s and self.tpot_s <= targets.tpot_s


@dataclass(frozen=True)
class Capacity:
    """What a request takes that is alone with nothing cached, and how many end per second when
    many are there."""

    alone: Outcome
    requests_s: float

    @property
    def targets(self) -> Targets:
        return Targets(TTFT_SCALE * self.alone.ttft_s, TPOT_SCALE * self.alone.tpot_s)


def compare(
    report: Report, model: str, rounds: Sequence[Sequence[Arrival]], block_tokens: int
) -> None:
    """Each round's arrivals on 2 + 2 workers by each policy, and on 4 colocated ones. Policies take
    turns, so that a machine that others use too is not slower for one of them."""
    asyncio.run(_compare(report, Cluster(model, block_tokens), rounds))


async def _compare(report: Report, cluster: "Cluster", rounds: Sequence[Sequence[Arrival]]) -> None:
    capacity = await cluster.capacity(rounds[0])
    report.add("slo.real.capacity", capacity.requests_s, "requests/s")
    report.add("slo.real.target.ttft", capacity.targets.ttft_s * 1e3, "ms")
    report.add("slo.real.target.tpot", capacity.targets.tpot_s * 1e3, "ms")
    met: dict[tuple[str, float], list[bool]] = defaultdict(list)
    for arrivals in rounds:
        for policy in POLICIES:
            async with cluster.running(policy) as router:
                for load, part in zip(LOADS, _shared_out(arrivals), strict=True):
                    paced = _at_rate(part, load * capacity.requests_s)
                    outcomes = await router.replay(paced, capacity.targets)
                    met[policy, load] += [o.met(capacity.targets) for o in outcomes]
                if policy == "slo" and arrivals is rounds[-1]:
                    await router.report_errors(report)
    attained = {run: statistics.mean(kept) for run, kept in met.items()}
    for (policy, load), share in attained.items():
        report.add(f"slo.real.attainment.{policy}.{round(load * 100)}", share, "share")
    goodput = {p: sum(load * attained[p, load] for load in LOADS) for p in POLICIES}
    for policy in POLICIES[1:]:
        if goodput[policy]:
            report.add(f"slo.real.goodput.vs_{policy}", goodput["slo"] / goodput[policy], "x")


def _shared_out(arrivals: Sequence[Arrival]) -> list[Sequence[Arrival]]:
    size = len(arrivals) // len(LOADS)
    return [arrivals[n * size : (n + 1) * size] for n in range(len(LOADS))]


def _at_rate(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """So many a second, with the gaps that they have."""
    first = arrivals[0].at_s
    factor = (len(arrivals) - 1) / rate / (arrivals[-1].at_s - first)
    return [replace(arrival, at_s=(arrival.at_s - first) * factor) for arrival in arrivals]


@dataclass(frozen=True)
class Cluster:
    model: str
    block_tokens: int

    async def capacity(self, arrivals: Sequence[Arrival]) -> Capacity:
        """Of 2 + 2 workers, with a policy that predicts nothing."""
        alone = [replace(arrival, blocks=()) for arrival in arrivals[: WARM_UPS + ALONE]]
        async with self.running("least_loaded") as router:
            outcomes = [await router.send(arrival) for arrival in alone][WARM_UPS:]
            ttft_s = statistics.median(outcome.ttft_s for outcome in outcomes)
            tpot_s = statistics.median(outcome.tpot_s for outcome in outcomes)
            began = time.perf_counter()
            await router.crowd(arrivals[: 4 * AT_ONCE], AT_ONCE)
            seconds = time.perf_counter() - began
        return Capacity(Outcome(ttft_s, tpot_s), 4 * AT_ONCE / seconds)

    @contextlib.asynccontextmanager
    async def running(self, policy: str) -> AsyncIterator["Router"]:
        """Workers of a `baton up`, and a router of our own before them."""
        prefills, name = (0, "least_loaded") if policy == "colocated" else (2, policy)
        pools = ("--prefill", str(prefills), "--decode", str(4 - prefills))
        port, redis = _gateway.free_port(), EmbeddedRedis()
        common = ("--model", self.model, "--redis", await redis.start())
        auto = ("--decode-prefills", "auto")
        own = ("--port", str(port), "--policy", name, *auto, "--log-level", "error")
        with tempfile.NamedTemporaryFile() as samples:
            command = (ROUTER, samples.name, *common, *own)
            try:
                with (
                    running_cluster(self.model, *common[2:], *pools, *auto, *MEMORY),
                    _gateway.process(*command),
                ):
                    await _gateway.until_ready(port)
                    async with _client(port) as client:
                        yield Router(client, self.block_tokens, Path(samples.name))
            finally:
                await redis.stop()


def _client(port: int) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=300, limits=limits)


class Router:
    """The client's side of it. Prompts are numbered as they are sent."""

    def __init__(self, client: httpx.AsyncClient, block_tokens: int, samples: Path) -> None:
        self._client = client
        self._block_tokens = block_tokens
        self._samples = samples
        self._numbers = itertools.count()

    async def replay(self, arrivals: Sequence[Arrival], targets: Targets) -> list[Outcome]:
        """Each at its time."""
        started = time.perf_counter()

        async def send(arrival: Arrival) -> Outcome:
            await asyncio.sleep(max(0.0, arrival.at_s - (time.perf_counter() - started)))
            return await self.send(arrival, targets)

        return await asyncio.gather(*map(send, arrivals))

    async def crowd(self, arrivals: Sequence[Arrival], at_once: int) -> None:
        """As many at once, one after the other."""
        left = iter(arrivals)

        async def client() -> None:
            for arrival in left:
                await self.send(arrival)

        await asyncio.gather(*(client() for _ in range(at_once)))

    async def send(self, arrival: Arrival, targets: Targets = Targets()) -> Outcome:  # noqa: B008
        body = {
            "prompt": self._prompt(arrival),
            "max_tokens": arrival.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        if math.isfinite(targets.ttft_s):
            body["slo"] = {"ttft_ms": targets.ttft_s * 1e3, "tpot_ms": targets.tpot_s * 1e3}
        sent_at, times = time.perf_counter(), []
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    times.append(time.perf_counter())
        rest = max(arrival.output_tokens - 1, 1)
        return Outcome(times[0] - sent_at, (times[-1] - times[0]) / rest)

    def _prompt(self, arrival: Arrival) -> list[int]:
        """Equal block ids give equal tokens; what no block names is the request's own."""
        prompt: list[int] = []
        for block in arrival.blocks:
            prompt += random.Random(block).choices(VOCABULARY, k=self._block_tokens)
        rest = max(arrival.input_tokens - len(prompt), 0)
        prompt += random.Random(-1 - next(self._numbers)).choices(VOCABULARY, k=rest)
        return prompt[: arrival.input_tokens]

    async def report_errors(self, report: Report) -> None:
        """The router's own account, and what the same model could have done at best."""
        metrics = (await self._client.get("/metrics")).text
        samples = read_samples(self._samples)
        for phase, costs in COSTS.items():
            found = re.search(rf'baton_prediction_error{{phase="{phase}"}} ([\d.e-]+)', metrics)
            if found:
                report.add(f"predictor.mape.real.{phase}", float(found[1]), "share")
                report.add(f"predictor.floor.real.{phase}", least_mape(samples[costs]), "share")
