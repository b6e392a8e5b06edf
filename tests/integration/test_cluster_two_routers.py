"""Two routers on one Redis, before the same real workers: they choose alike, and either may die."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.cluster.load_ledger import NOTHING
from baton.store import StoredModel
from tests.support.cluster import COMPLETIONS, Cluster, Router, running_cluster, running_router
from tests.support.redis import eventually

PROMPT = "The quick brown fox jumps over the lazy dog. " * 4
# The policy that asks for nothing else: what is known of prefixes alone makes the choice.
PREFIX = {"policy": "prefix"}
LONG = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "temperature": 0}


@pytest.fixture
async def cluster(tiny_chat: StoredModel) -> AsyncIterator[Cluster]:
    async with running_cluster(tiny_chat, prefills=2, decodes=2, router=PREFIX) as cluster:
        await cluster.learn_the_usual()
        yield cluster


async def choice(router: Router, prompt: str) -> dict[str, Any]:
    """Where it sends the prompt, and what it expects to be cached there."""
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
    response = await router.client.post(COMPLETIONS, json=body, headers={"x-baton-explain": "1"})
    assert response.status_code == 200, response.text
    return dict(response.json()["placement"][0]["chosen"])


async def test_what_one_router_has_sent_somewhere_the_other_sends_there_too(
    cluster: Cluster,
) -> None:
    first = cluster.router
    async with running_router(cluster, **PREFIX) as second:
        for router in (first, second):
            index = router.gateway.shared.index
            assert index is not None
            index._lookup_timeout_s = 2.0  # a busy machine must not decide
        ledgers = [router.gateway.shared.ledger for router in (first, second)]
        await eventually(lambda: all(ledger.num_others == 1 for ledger in ledgers))
        names = [worker.settings.worker_id for worker in cluster.workers]
        for number in range(6):
            router, other = (first, second) if number % 2 else (second, first)
            prompt = f"{number} {PROMPT}"
            went = await choice(router, prompt)
            assert went["cached_tokens"] == 0
            await eventually(
                lambda: all(ledger.load(name) == NOTHING for ledger in ledgers for name in names)
            )
            again = await choice(other, prompt)
            assert (again["prefill"], again["decode"]) == (went["prefill"], went["decode"])
            assert again["cached_tokens"] > 0
    await cluster.assert_unharmed()


async def test_streams_of_one_router_and_the_workers_survive_the_death_of_the_other(
    cluster: Cluster,
) -> None:
    expected = (await cluster.ask(COMPLETIONS, **LONG)).text
    async with running_router(cluster) as second:
        theirs = asyncio.create_task(second.client.post(COMPLETIONS, json=LONG))
        ours = asyncio.create_task(cluster.ask(COMPLETIONS, stream=True, **LONG))
        await eventually(lambda: sum(len(d.scheduler.running) for d in cluster.decodes) == 2)
        theirs.cancel()
    assert (await ours).text == expected
    await cluster.assert_unharmed()
    names = [worker.settings.worker_id for worker in cluster.workers]
    loads = cluster.router.gateway.shared.ledger
    await eventually(lambda: all(loads.load(name) == (0, 0) for name in names))
