"""Baton on several Ray nodes: pairs stay together, and losing a part loses no answer."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
import pytest_asyncio

from tests.support.answers import Answer, events_of, gather_events
from tests.support.ray_nodes import COMPLETIONS, BatonOnRay, RayNodes, info

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
LONG: dict[str, Any] = {
    "prompt": "It was a bright cold day in April, and the clocks were striking. " * 4,
    "max_tokens": 1200,
    "ignore_eos": True,
    "temperature": 0,
    "logprobs": 0,
}


async def test_the_two_of_a_pair_share_a_node_and_pairs_do_not(baton: BatonOnRay) -> None:
    """Each node has room for two workers."""
    nodes = {name: baton.place(name).node_id for name in NAMES}
    assert nodes["prefill-0"] == nodes["decode-0"] != nodes["prefill-1"] == nodes["decode-1"]


async def test_kv_is_handed_over_beside_ray_and_the_router_stands_with_the_driver(
    baton: BatonOnRay, nodes: RayNodes
) -> None:
    answer = await baton.ask(**LONG | {"max_tokens": 8})
    assert answer.counts[1] == 8
    addresses = [record["address"] for record in await baton.records()]
    links = [link for address in addresses for link in (await info(address)).links]
    assert links and {link.transport for link in links} == {"shm"}
    workers = {baton.place(name).node_id for name in NAMES}
    assert baton.place("router").node_id not in workers
    await baton.wait_at_rest()


def kill_the_actor(baton: BatonOnRay, nodes: RayNodes, name: str) -> None:
    baton.kill_actor(name)


def remove_the_node(baton: BatonOnRay, nodes: RayNodes, name: str) -> None:
    nodes.lose(baton.place(name).node_id)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(baton: BatonOnRay) -> Answer:
    """What nothing disturbs."""
    return await baton.ask(**LONG)


@pytest.mark.parametrize("role", ["decode", "prefill"])
@pytest.mark.parametrize("loss", [kill_the_actor, remove_the_node])
async def test_a_stream_goes_on_with_the_same_tokens_and_only_the_lost_are_started_again(
    baton: BatonOnRay,
    nodes: RayNodes,
    expected: Answer,
    loss: Callable[[BatonOnRay, RayNodes, str], None],
    role: str,
) -> None:
    restarts, continued = len(baton.restarts), await baton.continued()
    answer, lost = await _ask_and_lose(baton, nodes, loss, role)
    assert answer.tokens == expected.tokens and answer.counts == expected.counts
    assert answer.reasons == ["length"]
    cut = role == "decode" or loss is remove_the_node
    assert await baton.continued() == continued + cut, "it ended before the loss"
    await baton.wait_workers(*NAMES)
    nodes.restore()
    again = baton.restarts[restarts:]
    assert {line.split()[1] for line in again} == lost and len(again) == len(lost)
    short = await baton.ask(**LONG | {"max_tokens": 32})
    assert short.tokens == [expected.tokens[0][:32]]
    await baton.wait_at_rest()


async def _ask_and_lose(
    baton: BatonOnRay,
    nodes: RayNodes,
    loss: Callable[[BatonOnRay, RayNodes, str], None],
    role: str,
) -> tuple[Answer, set[str]]:
    """Streams, and loses a worker after the first events; the answer and who was lost."""
    async with baton.client() as client:
        body = {**LONG, "stream": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", COMPLETIONS, json=body) as response:
            assert response.status_code == 200, await response.aread()
            reading = asyncio.create_task(gather_events(response))
            decode = await baton.busy("decode")
            name = decode if role == "decode" else decode.replace("decode", "prefill")
            node = baton.place(name).node_id
            there = {other for other in NAMES if baton.place(other).node_id == node}
            await asyncio.to_thread(loss, baton, nodes, name)
            lost = there if loss is remove_the_node else {name}
            return await reading, lost


async def test_a_hundred_streams_that_are_cut_leak_nothing_and_restart_nobody(
    baton: BatonOnRay, expected: Answer
) -> None:
    rng = random.Random(7)
    restarts = len(baton.restarts)
    before = {record["worker_id"]: record["incarnation"] for record in await baton.records()}

    async def cut(number: int) -> None:
        body = {**LONG, "stream": True, "cache_salt": str(number)}
        events = rng.randrange(1, 40)
        async with (
            baton.client() as client,
            client.stream("POST", COMPLETIONS, json=body) as response,
        ):
            assert response.status_code == 200, await response.aread()
            stream = aiter(events_of(response))
            for _ in range(events):
                await anext(stream)

    whole = [asyncio.create_task(baton.ask(**LONG)) for _ in range(3)]
    for start in range(0, 100, 20):
        await asyncio.gather(*(cut(number) for number in range(start, start + 20)))
    for answer in await asyncio.gather(*whole):
        assert answer.tokens == expected.tokens
    await baton.wait_at_rest()
    after = {record["worker_id"]: record["incarnation"] for record in await baton.records()}
    assert after == before and len(baton.restarts) == restarts
