"""Misses are provoked on real workers and named by their cause."""

import asyncio
import contextlib
import itertools
import random
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from baton.cluster.prefix_index import PrefixIndex, PrefixStore, PromptBlocks
from baton.cluster.redis_link import RedisLink
from baton.cluster.workers import Role
from baton.engine.transfer.base import HandoffLost
from baton.store import StoredModel
from decode_service.inbox import Inbox
from decode_service.reservations import Reservations
from prefill_service.worker import Done, PrefillWorker
from router.generation import Generation
from tests.integration.test_cluster_ledger import body, ledger_of, prompt, slow_down
from tests.support.cluster import COMPLETIONS, Cluster, running_cluster
from tests.support.gateway import until
from tests.support.redis import until as until_known

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLOW_S = 0.2
LATE = {"x-baton-ttft-ms": "100", "x-baton-tpot-ms": "10000"}
LATE_TOKENS = {"x-baton-ttft-ms": "10000", "x-baton-tpot-ms": "30"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tiny_chat: StoredModel) -> AsyncIterator[Cluster]:
    """Each prefill step takes 0.2 s longer; two requests run at a time, both at the worker."""
    router = {"policy": "round_robin", "decode_prefills": "never", "max_running": 2}
    router["prefill_backlog_s"] = 60.0
    async with running_cluster(tiny_chat, router=router) as running:
        slow_down(running.prefills[0], SLOW_S)
        yield running


async def ask(
    cluster: Cluster, name: str, request: dict[str, Any], targets: dict[str, str] = LATE
) -> dict[str, Any]:
    headers = {**targets, "x-request-id": name, "x-baton-tenant": "team-a"}
    response = await cluster.client.post(
        COMPLETIONS, json={**request, "stream": False}, headers=headers
    )
    assert response.status_code == 200, response.text
    return await ledger_of(cluster, name)


def tpot_miss(ledger: dict[str, Any]) -> dict[str, Any]:
    (miss,) = [miss for miss in ledger["misses"] if miss["target"] == "tpot"]
    assert isinstance(miss, dict) and miss["seen_ms"] > miss["target_ms"] == 30
    return miss


def ttft_miss(ledger: dict[str, Any]) -> dict[str, Any]:
    (miss,) = [miss for miss in ledger["misses"] if miss["target"] == "ttft"]
    assert isinstance(miss, dict) and miss["seen_ms"] > miss["target_ms"] == 100
    return miss


async def test_a_long_prompt_is_named(cluster: Cluster) -> None:
    ledger = await ask(cluster, "long", body(prompt(random.Random(1), 150)))
    miss = ttft_miss(ledger)
    assert miss["cause"] == "long_prompt"
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


async def test_a_prefix_that_another_worker_held_is_named(tiny_chat: StoredModel) -> None:
    """Round robin goes past the worker that has the prompt's beginning in its cache."""
    router = {"policy": "round_robin", "decode_prefills": "never"}
    async with running_cluster(tiny_chat, 2, 1, router=router) as running:
        for worker in running.prefills:
            slow_down(worker, SLOW_S)
        asked = body(prompt(random.Random(8), 96))
        first = await ask(running, "first", asked)
        assert ttft_miss(first)["cause"] == "long_prompt"
        await known_to_the_index(running, asked["prompt"])
        second = await ask(running, "second", asked)
        assert workers(first, "prefill") != workers(second, "prefill")
        assert ttft_miss(second)["cause"] == "cold_prefix"


async def known_to_the_index(running: Cluster, asked: list[int]) -> None:
    link = RedisLink(running.redis_url)
    index = PrefixIndex(link, PrefixStore(link.client), lookup_timeout_s=2.0)
    prefills = [w for w in running.gateway.directory.snapshot() if w.role is Role.PREFILL]

    async def held() -> bool:
        matches = await index.lookup(PromptBlocks(asked), prefills)
        return any(map(matches.held_tokens, prefills))

    await until_known(held)
    await link.close()


def workers(ledger: dict[str, Any], role: str) -> set[str]:
    return {p["where"] for p in ledger["timing"]["phases"] if p["where"].startswith(role)}


async def test_a_slow_transfer_is_named(
    tiny_chat: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver = Inbox.deliver

    async def slowly(*args: Any) -> None:
        await asyncio.sleep(3 * SLOW_S)
        await deliver(*args)

    router = {"decode_prefills": "never"}
    async with running_cluster(tiny_chat, router=router) as running:
        monkeypatch.setattr(Inbox, "deliver", slowly)
        ledger = await ask(running, "slow-link", body(prompt(random.Random(9), 40)), LATE_TOKENS)
    assert tpot_miss(ledger)["cause"] == "transfer"


async def test_a_transfer_is_told_of_though_decode_is_quicker_with_all_the_rest(
    tiny_chat: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill says last what it sent: a ledger that ended with decode once had no transfer."""
    prefill = PrefillWorker.prefill

    def decoded() -> bool:
        scheduler = running.decodes[0].scheduler
        return not scheduler.num_promised_seqs and not list(scheduler.sequences())

    async def late_at_last(self: PrefillWorker, job: Any) -> AsyncIterator[Any]:
        async with contextlib.aclosing(prefill(self, job)) as events:
            async for event in events:
                if isinstance(event, Done):
                    await until(decoded)
                    await asyncio.sleep(SLOW_S)
                yield event

    async with running_cluster(tiny_chat, router={"decode_prefills": "never"}) as running:
        monkeypatch.setattr(PrefillWorker, "prefill", late_at_last)
        ledger = await ask(running, "overtaken", body(prompt(random.Random(9), 40)))
    assert ledger["timing"]["transfer"]["bytes"] > 0
    assert "kv_transfer" in phases(ledger)


async def test_a_full_decode_batch_is_named(
    tiny_chat: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes 50 ms longer for each sequence beside the first. The crowd decodes together: its
    first step waits until all have landed, or the first might end before the others come."""
    async with running_cluster(tiny_chat, router={"decode_prefills": "never"}) as running:
        runner = running.decodes[0].parts.engine._runner
        run, commit, landed = runner.run, Reservations.commit, threading.Semaphore(0)

        def counted(*landing: Any) -> None:
            commit(*landing)
            landed.release()

        def crowded(batch: Any) -> Any:
            while missing and landed.acquire(timeout=10):
                missing.pop()
            time.sleep(0.05 * (len(batch.items) - 1))
            return run(batch)

        monkeypatch.setattr(Reservations, "commit", counted)
        monkeypatch.setattr(runner, "run", crowded)
        missing = ["alone"]
        await ask(running, "alone", body(prompt(random.Random(10), 40)), LATE_TOKENS)
        missing += ["crowd"] * 3
        asked = [body(prompt(random.Random(11 + n), 40), max_tokens=12) for n in range(3)]
        crowd = [ask(running, f"crowd-{n}", each, LATE_TOKENS) for n, each in enumerate(asked)]
        for ledger in await asyncio.gather(*crowd):
            assert tpot_miss(ledger)["cause"] == "decode_batch"


async def test_a_preemption_is_named(tiny_chat: StoredModel) -> None:
    """10 blocks of 16, 6 wanted by each of two after 16 tokens: one waits until the other has
    ended, 44 steps later. A step takes 80 ms and what the machine adds, which may be 50 ms."""
    targets = {"x-baton-ttft-ms": "30000", "x-baton-tpot-ms": "130"}
    router = {"decode_prefills": "never"}
    async with running_cluster(tiny_chat, router=router, decode={"num_blocks": 10}) as running:
        slow_down(running.decodes[0], 0.08)
        asked = [body(prompt(random.Random(21 + n), 64), max_tokens=60) for n in range(2)]
        both = [ask(running, f"large-{n}", each, targets) for n, each in enumerate(asked)]
        ledgers = await asyncio.gather(*both)
        waited = [ledger for ledger in ledgers if "preempted" in phases(ledger)]
        assert waited
        for ledger in waited:
            (miss,) = [miss for miss in ledger["misses"] if miss["target"] == "tpot"]
            assert miss["cause"] == "preemption", miss["shares_ms"]


def phases(ledger: dict[str, Any]) -> set[str]:
    return {phase["name"] for phase in ledger["timing"]["phases"]}


async def test_a_lost_attempt_is_named(
    tiny_chat: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt, attempts = PrefillWorker.prefill, itertools.count()

    async def lost_once(self: PrefillWorker, job: Any) -> AsyncIterator[Any]:
        if next(attempts) == 0:
            await asyncio.sleep(5 * SLOW_S)
            raise HandoffLost("on purpose")
        async with contextlib.aclosing(attempt(self, job)) as events:
            async for event in events:
                yield event

    async with running_cluster(tiny_chat, 2, 1, router={"decode_prefills": "never"}) as running:
        monkeypatch.setattr(PrefillWorker, "prefill", lost_once)
        miss = ttft_miss(await ask(running, "again", body(prompt(random.Random(30), 20))))
        assert miss["cause"] == "retry"


async def test_a_model_that_is_slow_by_itself_is_named(tiny_chat: StoredModel) -> None:
    """Nobody is beside the request, and nothing else takes time."""
    async with running_cluster(tiny_chat, router={"decode_prefills": "never"}) as running:
        slow_down(running.decodes[0], SLOW_S)
        ledger = await ask(running, "alone", body(prompt(random.Random(40), 40)), LATE_TOKENS)
    miss = tpot_miss(ledger)
    assert miss["cause"] == "model" and miss["shares_ms"]["model"] >= 7 * SLOW_S * 1e3


async def test_a_router_that_is_slow_itself_is_named(
    tiny_chat: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    push = Generation.push

    def slowly(self: Generation, tokens: Any) -> Any:
        time.sleep(SLOW_S)
        return push(self, tokens)

    async with running_cluster(tiny_chat, router={"decode_prefills": "never"}) as running:
        monkeypatch.setattr(Generation, "push", slowly)
        ledger = await ask(running, "busy", body(prompt(random.Random(41), 40)), LATE_TOKENS)
    assert tpot_miss(ledger)["cause"] == "router"
