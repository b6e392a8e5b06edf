"""Misses are provoked on real workers and named by their cause."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from baton.store import StoredModel
from tests.integration.test_cluster_ledger import body, ledger_of, prompt, slow_down
from tests.support.cluster import COMPLETIONS, Cluster, running_cluster
from tests.support.gateway import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLOW_S = 0.2
LATE = {"x-baton-ttft-ms": "100", "x-baton-tpot-ms": "10000"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tiny_chat: StoredModel) -> AsyncIterator[Cluster]:
    """Each prefill step takes 0.2 s longer; two requests run at a time, both at the worker."""
    router = {"policy": "round_robin", "decode_prefills": "never", "max_running": 2}
    router["prefill_backlog_s"] = 60.0
    async with running_cluster(tiny_chat, router=router) as running:
        slow_down(running.prefills[0], SLOW_S)
        yield running


async def ask(cluster: Cluster, name: str, request: dict[str, Any]) -> dict[str, Any]:
    headers = {**LATE, "x-request-id": name, "x-baton-tenant": "team-a"}
    response = await cluster.client.post(
        COMPLETIONS, json={**request, "stream": False}, headers=headers
    )
    assert response.status_code == 200, response.text
    return await ledger_of(cluster, name)


def ttft_miss(ledger: dict[str, Any]) -> dict[str, Any]:
    (miss,) = [miss for miss in ledger["misses"] if miss["target"] == "ttft"]
    assert isinstance(miss, dict) and miss["seen_ms"] > miss["target_ms"] == 100
    return miss


async def test_a_long_prompt_is_named(cluster: Cluster) -> None:
    ledger = await ask(cluster, "long", body(prompt(random.Random(1), 150)))
    miss = ttft_miss(ledger)
    assert miss["cause"] == "long_prompt" and miss["sufficient"]
    assert miss["shares_ms"]["long_prompt"] >= 3 * SLOW_S * 1e3
    assert ledger["tenant"] == "team-a" and ledger["ttft_target_ms"] == 100


async def test_a_queue_at_prefill_is_named(cluster: Cluster) -> None:
    """The second prompt fits into one step, but waits for the first one's steps."""
    first = asyncio.create_task(ask(cluster, "ahead", body(prompt(random.Random(2), 400))))
    await until(lambda: bool(cluster.prefills[0].scheduler.running))
    ledger = await ask(cluster, "behind", body(prompt(random.Random(3), 20)))
    await first
    shares = ttft_miss(ledger)["shares_ms"]
    assert max(shares, key=shares.__getitem__) == "prefill_queue", shares


async def test_the_routers_queue_is_named(cluster: Cluster) -> None:
    ahead = [
        asyncio.create_task(ask(cluster, f"run-{i}", body(prompt(random.Random(i), 200))))
        for i in (4, 5)
    ]
    await until(lambda: cluster.gateway.admission.running == 2)
    ledger = await ask(cluster, "waits", body(prompt(random.Random(6), 20)))
    await asyncio.gather(*ahead)
    shares = ttft_miss(ledger)["shares_ms"]
    assert max(shares, key=shares.__getitem__) == "admission_queue", shares


async def test_reports_count_misses_by_cause_and_tenant(cluster: Cluster) -> None:
    await ask(cluster, "counted", body(prompt(random.Random(7), 150)))
    found = (await cluster.client.get("/v1/reports?tenant=team-a")).json()
    assert found["misses"]["ttft"]["long_prompt"] >= 1
    assert found["attainment"] < 1
    nobody = (await cluster.client.get("/v1/reports?tenant=nobody")).json()
    assert nobody["requests"] == 0 and nobody["misses"] == {"ttft": {}, "tpot": {}}
