"""Redis fails under load in every way: requests go on, health says so, and prefixes are found again
without restarting anything."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from baton.cluster.load_ledger import CONFIRM_TIMEOUT_S
from baton.cluster.prefix_index import PromptBlocks
from baton.cluster.prefix_index.index import LOOKUP_TIMEOUT_S
from baton.cluster.redis_server import EmbeddedRedis
from baton.store import StoredModel
from tests.support.cluster import COMPLETIONS, Cluster, running_cluster
from tests.support.redis import eventually, until, until_equal

PROMPT = list(range(20, 120))  # 6 full blocks of 16 and a rest
Act = Callable[[EmbeddedRedis, str], Awaitable[None]]


def send(number: signal.Signals) -> Act:
    async def act(server: EmbeddedRedis, url: str) -> None:
        os.kill(server.pid or 0, number)

    return act


def tell(*command: str) -> Act:
    async def act(server: EmbeddedRedis, url: str) -> None:
        async with Redis.from_url(url) as client:
            await client.execute_command(*command)

    return act


async def start_again(server: EmbeddedRedis, url: str) -> None:
    await server.stop()
    await server.start(int(url.rsplit(":", 1)[1].split("/")[0]))


FAULTS: dict[str, tuple[Act, Act, bool]] = {
    # how it breaks, how it is mended, whether health says degraded meanwhile
    "killed": (send(signal.SIGKILL), start_again, True),
    "paused": (send(signal.SIGSTOP), send(signal.SIGCONT), True),
    "read-only": (tell("REPLICAOF", "127.0.0.1", "1"), tell("REPLICAOF", "NO", "ONE"), True),
    "full": (
        tell("CONFIG", "SET", "maxmemory", "1"),
        tell("CONFIG", "SET", "maxmemory", "0"),
        True,
    ),
    "emptied": (tell("FLUSHALL"), tell("PING"), False),
}


async def health(cluster: Cluster) -> str:
    response = await cluster.client.get("/health")
    assert response.status_code == 200
    return str(response.json()["status"])


async def found(cluster: Cluster) -> bool:
    """The index knows a worker that holds the prompt."""
    index = cluster.gateway.shared.index
    assert index is not None
    matches = await index.lookup(PromptBlocks(PROMPT), cluster.gateway.directory.snapshot())
    return matches.available and any(matches.held.values())


@pytest.mark.parametrize(
    "fault",
    [
        *("paused", "emptied"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("killed", "read-only", "full")),
    ],
)
async def test_requests_go_on_while_redis_is(fault: str, tiny_chat: StoredModel) -> None:
    """IBM/mcp-context-forge#3587: calls blocked for ever, and nothing connected again."""
    break_it, mend_it, degrades = FAULTS[fault]
    async with running_cluster(tiny_chat) as cluster:
        body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True, "seed": 1}
        usual = (await cluster.ask(COMPLETIONS, **body)).text
        await until(lambda: found(cluster))
        running, served = True, 0

        async def load() -> None:
            nonlocal served
            while running:
                assert (
                    await cluster.ask(COMPLETIONS, stream=served % 2 == 0, **body)
                ).text == usual
                served += 1

        clients = [asyncio.create_task(load()) for _ in range(3)]
        await break_it(cluster.redis, cluster.redis_url)
        if degrades:
            await until_equal(lambda: health(cluster), "degraded")
        before = served
        await eventually(lambda: served >= before + 12, timeout_s=60)
        if degrades:
            await asyncio.sleep(3.5)  # longer than what is in Redis lives without its writers
            before = served
            await eventually(lambda: served >= before + 6, timeout_s=60)
            assert await health(cluster) == "degraded"
        await mend_it(cluster.redis, cluster.redis_url)
        await until_equal(lambda: health(cluster), "ok")
        await until(lambda: found(cluster))
        running = False
        await asyncio.gather(*clients)
        await cluster.settle()
        again = await cluster.ask(COMPLETIONS, **body)
        assert (again.text, again.num_cached) == (usual, 96)


def test_a_request_waits_for_redis_for_less_than_50_ms() -> None:
    """One look-up and one confirmation at most: what is not answered makes later calls ask nobody,
    see test_without_redis_lookups_end_at_once_and_return_when_it_is_back."""
    assert LOOKUP_TIMEOUT_S + CONFIRM_TIMEOUT_S < 0.05
