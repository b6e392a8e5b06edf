"""What the pools look like: loads from the registry, queue, misses and predictions from a router.

Owns the meaning of load; decides nothing. With several routers behind one port a different one may
answer each time; each sees its own requests.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from baton.cli.local import key_headers
from baton.cluster.errors import RegistryUnavailable
from baton.cluster.registry import Registry
from baton.cluster.workers import Role, WorkerRecord
from baton_ray.autoscale.policy import PoolState

WINDOW_S = 30
TIMEOUT_S = 2.0
# Prompts that wait for one prefill worker and keep it busy for about as long as one may wait.
PROMPTS_PER_WORKER = 4
# Above it decode is what requests wait for.
FULL = 0.9
CAUSES = {
    Role.PREFILL: ("admission_queue", "prefill_queue", "long_prompt", "cold_prefix"),
    Role.DECODE: ("decode_batch", "preemption"),
}
TARGET = {Role.PREFILL: "ttft", Role.DECODE: "tpot"}


class SignalsUnavailable(Exception):
    """Redis or the router does not answer: nothing can be said."""


@dataclass(frozen=True)
class Targets:
    """Those of the server, in milliseconds; requests may have others."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


class Signals:
    """`router`: its URL."""

    def __init__(self, redis_url: str, router: str, targets: Targets) -> None:
        self._registry = Registry(redis_url)
        # It is our own router, and its certificate is hardly for this address.
        self._client = httpx.AsyncClient(
            base_url=router, timeout=TIMEOUT_S, trust_env=False, verify=False, headers=key_headers()
        )
        self._targets = targets

    async def close(self) -> None:
        await self._registry.close()
        await self._client.aclose()

    async def read(self) -> tuple[list[WorkerRecord], dict[Role, PoolState]]:
        """The live workers, draining ones included, and the state of each pool. Raises
        SignalsUnavailable."""
        try:
            records = await self._registry.list()
            report = await self._client.get("/v1/reports", params={"window": WINDOW_S})
            metrics = await self._client.get("/metrics")
            report.raise_for_status()
            queue = gauge(metrics.raise_for_status().text, "baton_queue_length")
            return records, pools(records, queue, report.json(), self._targets)
        except (RegistryUnavailable, httpx.HTTPError, ValueError, KeyError) as error:
            raise SignalsUnavailable(str(error)) from error


def pools(
    records: Sequence[WorkerRecord], queue: float, report: dict[str, Any], targets: Targets
) -> dict[Role, PoolState]:
    """`queue`: requests that wait in the router; `report`: its GET /v1/reports."""
    by_role = {role: [r for r in records if r.role is role] for role in Role}
    loads = {
        Role.PREFILL: sum(map(prefill_load, by_role[Role.PREFILL])),
        Role.DECODE: sum(map(decode_load, by_role[Role.DECODE])),
    }
    seats = [record.max_num_seqs for record in by_role[Role.DECODE]]
    decode_is_full = bool(seats) and loads[Role.DECODE] >= FULL * len(seats)
    if decode_is_full:
        loads[Role.DECODE] += queue / min(seats)
    else:
        loads[Role.PREFILL] += queue / PROMPTS_PER_WORKER
    return {role: PoolState(loads[role], missed(role, report, targets)) for role in Role}


def prefill_load(record: WorkerRecord) -> float:
    """A prompt that is computed keeps a worker busy, those behind it wait."""
    return min(record.load.running, 1) + record.load.waiting / PROMPTS_PER_WORKER


def decode_load(record: WorkerRecord) -> float:
    """Seats or KV, whichever is scarcer."""
    load = record.load
    seats = (load.running + load.waiting) / record.max_num_seqs
    kv = (record.num_blocks - load.free_blocks + load.promised_blocks) / record.num_blocks
    return max(seats, kv)


def missed(role: Role, report: dict[str, Any], targets: Targets) -> float:
    """Share of recent requests that missed their target because of this pool; 1 when the mean
    latency that is predicted for them is beyond the server's target."""
    name = TARGET[role]
    target, predicted = getattr(targets, f"{name}_ms"), report[f"predicted_{name}_ms"]
    if target is not None and predicted is not None and predicted > target:
        return 1.0
    counted = report["with_phases"]
    return _sum_of(report["misses"][name], CAUSES[role]) / counted if counted else 0.0


def _sum_of(counts: dict[str, float], names: Iterable[str]) -> float:
    return sum(counts.get(name, 0.0) for name in names)


def gauge(text: str, name: str) -> float:
    """The value of a metric without labels. Raises KeyError."""
    for line in text.splitlines():
        if line.startswith(f"{name} "):
            return float(line.split()[1])
    raise KeyError(name)
