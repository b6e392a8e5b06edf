"""The prefix-heavy workload on real workers with a real model: goodput by policy, and how far the
router's predictions are off after that many requests.
"""

import asyncio
import random
import re
import time
from dataclasses import dataclass

import httpx
from _cluster import running_cluster
from _common import Report
from _sim import Arrival

from router.predictor import Phase
from router.targets import Targets

VOCABULARY = range(3, 40_000)


@dataclass(frozen=True)
class Outcome:
    ttft_s: float
    tpot_s: float

    def met(self, targets: Targets) -> bool:
        return self.ttft_s <= targets.ttft_s and self.tpot_s <= targets.tpot_s


def compare(
    report: Report, model: str, arrivals: list[Arrival], targets: Targets, block_tokens: int
) -> None:
    """`arrivals` on 2 + 2 workers by each policy, and on 4 colocated ones."""
    shares: dict[str, float] = {}
    for policy in ("slo", "round_robin", "least_loaded", "prefix", "colocated"):
        flags = _flags(policy)
        with running_cluster(model, *flags) as running:
            base_url = str(running.client.base_url)
            outcomes = asyncio.run(_replay(base_url, arrivals, targets, block_tokens))
            shares[policy] = sum(o.met(targets) for o in outcomes) / len(outcomes)
            report.add(f"slo.real.attainment.{policy}", shares[policy], "share")
            if policy == "slo":
                _errors(report, running.client.get("/metrics").text)
    for policy in list(shares)[1:]:
        if shares[policy]:
            report.add(f"slo.real.goodput.vs_{policy}", shares["slo"] / shares[policy], "x")


def _flags(policy: str) -> tuple[str, ...]:
    memory = ("--kv-memory", "128MiB", "--decode-prefills", "auto")
    if policy == "colocated":
        return (*memory, "--prefill", "0", "--decode", "4", "--policy", "least_loaded")
    return (*memory, "--prefill", "2", "--decode", "2", "--policy", policy)


def _errors(report: Report, metrics: str) -> None:
    for phase in Phase:
        found = re.search(rf'baton_prediction_error{{phase="{phase}"}} ([\d.e-]+)', metrics)
        if found:
            report.add(f"predictor.mape.real.{phase}", float(found[1]), "share")


async def _replay(
    base_url: str, arrivals: list[Arrival], targets: Targets, block_tokens: int
) -> list[Outcome]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=base_url, timeout=300, limits=limits) as client:
        started = time.perf_counter()

        async def send(number: int, arrival: Arrival) -> Outcome:
            await asyncio.sleep(max(0.0, arrival.at_s - (time.perf_counter() - started)))
            return await _send(client, _prompt(number, arrival, block_tokens), arrival, targets)

        return await asyncio.gather(*(send(*pair) for pair in enumerate(arrivals)))


async def _send(
    client: httpx.AsyncClient, prompt: list[int], arrival: Arrival, targets: Targets
) -> Outcome:
    body = {
        "prompt": prompt,
        "max_tokens": arrival.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "slo": {"ttft_ms": targets.ttft_s * 1e3, "tpot_ms": targets.tpot_s * 1e3},
    }
    sent_at, times = time.perf_counter(), []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    rest = max(arrival.output_tokens - 1, 1)
    return Outcome(times[0] - sent_at, (times[-1] - times[0]) / rest)


def _prompt(number: int, arrival: Arrival, block_tokens: int) -> list[int]:
    """Equal block ids give equal tokens; what no block names is the request's own."""
    prompt: list[int] = []
    for block in arrival.blocks:
        prompt += random.Random(block).choices(VOCABULARY, k=block_tokens)
    rest = max(arrival.input_tokens - len(prompt), 0)
    prompt += random.Random(-1 - number).choices(VOCABULARY, k=rest)
    return prompt[: arrival.input_tokens]
