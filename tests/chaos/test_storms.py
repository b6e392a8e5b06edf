"""Many requests at once while things go wrong: nothing leaks, and what is answered is right."""

import asyncio
import random
import time
from typing import Any

import httpx
import pytest

from tests.chaos.test_faults import NO_HANG_S, assert_same
from tests.support.answers import Answer, events_of
from tests.support.chaos_cluster import COMPLETIONS, ChaosCluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="session"),
]

LONG: dict[str, Any] = {
    "prompt": "It was a bright cold day in April, and the clocks were striking. " * 8,
    "max_tokens": 40,
    "ignore_eos": True,
    "temperature": 0,
}


@pytest.mark.brief
async def test_two_hundred_clients_that_leave_at_random_moments_leak_nothing(
    cluster: ChaosCluster,
) -> None:
    """Clients that left during the transfer once kept its blocks: after enough of them the
    worker stopped answering. Each leaves between its sending and half as long again as a first
    token takes, streaming or not."""
    rng = random.Random(6)
    expected = await cluster.ask(**LONG)
    async with cluster.client() as client:
        ttft = await first_token_s(client)

        async def leave_early(stream: bool) -> None:
            body = {**LONG, "stream": stream, "cache_salt": str(rng.random())}
            asking = asyncio.create_task(client.post(COMPLETIONS, json=body))
            await asyncio.wait({asking}, timeout=rng.uniform(0, 1.5 * ttft))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

        async with asyncio.timeout(NO_HANG_S + 15 * ttft):
            for _ in range(10):
                await asyncio.gather(*(leave_early(i % 2 == 0) for i in range(20)))
    await cluster.wait_at_rest()
    assert_same(await cluster.ask(**LONG), expected)
    await cluster.wait_at_rest()


async def first_token_s(client: httpx.AsyncClient) -> float:
    """Seconds to a first token, with as many others as will leave at once."""

    async def one() -> float:
        began = time.monotonic()
        body = {**LONG, "stream": True, "cache_salt": str(began)}
        async with client.stream("POST", COMPLETIONS, json=body) as response:
            await anext(aiter(events_of(response)))
            return time.monotonic() - began

    return max(await asyncio.gather(*(one() for _ in range(20))))


@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_twenty_requests_survive_the_loss_of_prefill_in_the_middle_of_its_blocks(
    cluster: ChaosCluster, how: str
) -> None:
    """A receiver once waited for ever for the end of a transfer. A prefill worker that wakes up
    later cannot write into blocks that are others' by now."""
    bodies = [LONG | {"prompt": f"Number {i}. {LONG['prompt']}"} for i in range(20)]
    expected = [await cluster.ask(**body) for body in bodies]
    victim = cluster.nodes["prefill-0"]

    async def strike() -> None:
        if cluster.faults.last["prefill.frame"] == victim.name:
            getattr(victim, how)()
        else:
            cluster.faults.arm("decode.frame", strike)

    cluster.faults.arm("decode.frame", strike, after=30)
    async with asyncio.timeout(NO_HANG_S):
        answers = await asyncio.gather(*(cluster.ask(**body) for body in bodies))
    assert victim.stopped or not victim.alive, "the fault never happened"
    for answer, wanted in zip(answers, expected, strict=True):
        assert_same(answer, wanted)
    await cluster.wait_at_rest()
    victim.restore()  # SIGCONT while others use the blocks
    again = await asyncio.gather(*(cluster.ask(**body) for body in bodies))
    for answer, wanted in zip(again, expected, strict=True):
        assert_same(answer, wanted)
    await cluster.restore()


@pytest.mark.parametrize("processes", ["shm"], indirect=True)
async def test_a_stream_whose_worker_is_killed_after_its_fifth_chunk_never_looks_whole(
    cluster: ChaosCluster,
) -> None:
    """A proxy once made up the finish reason "stop" for half an answer. Here both decode workers
    are lost one after the other: the text goes on, then the stream ends in an error."""
    body = LONG | {"max_tokens": 100, "stream": True}
    whole = await cluster.ask(**body)
    read, killed = asyncio.Event(), 0

    async def kill() -> None:
        nonlocal killed
        await read.wait()
        killed += 1
        cluster.busy("decode").kill()
        cluster.faults.arm("decode.step", kill, 12)

    cluster.faults.arm("decode.step", kill, 12)
    text, reasons, errors = "", [], []
    async with (
        asyncio.timeout(NO_HANG_S),
        cluster.client() as client,
        client.stream("POST", COMPLETIONS, json=body) as response,
    ):
        chunks = 0
        async for event in events_of(response):
            assert event != "[DONE]", "a silent end"
            if "error" in event:
                errors.append(event["error"]["code"])
                continue
            text += event["choices"][0]["text"]
            reasons += [event["choices"][0]["finish_reason"]]
            chunks += 1
            if chunks == 5:
                read.set()
    assert killed == 2
    assert whole.text.startswith(text) and len(text) > 12 and set(reasons) == {None}
    assert errors == ["worker_failed"]
    await cluster.wait_at_rest()


@pytest.mark.parametrize("processes", ["shm"], indirect=True)
async def test_a_dead_worker_costs_no_request_after_its_detection_and_serves_after_its_restart(
    cluster: ChaosCluster,
) -> None:
    """vllm-project/production-stack#420: a router kept sending to a dead node."""
    body = LONG | {"max_tokens": 8}
    expected = await cluster.ask(**body)
    victim = cluster.nodes["decode-0"]
    in_flight = [asyncio.create_task(cluster.ask(**body)) for _ in range(4)]
    before = await cluster.retries()
    victim.kill()
    began = time.monotonic()
    while victim.name in await cluster.known():
        assert time.monotonic() - began < 4, "still used"
        await asyncio.sleep(0.05)
    for answer in await asyncio.gather(*in_flight):
        assert_same(answer, expected)
    detected = await cluster.retries()
    assert detected - before <= len(in_flight)
    for _ in range(50):
        assert_same(await cluster.ask(**body), expected)
    assert await cluster.retries() == detected, "it was asked again"
    await cluster.restore()
    served = cluster.faults.by[victim.name, "decode.reserve"]
    await ask_all(cluster, [body] * 12)
    assert cluster.faults.by[victim.name, "decode.reserve"] > served, "it is not used again"


@pytest.mark.parametrize("processes", ["torch", "grpc"], indirect=True)
async def test_an_idle_cluster_serves_at_once_warm_and_cold(cluster: ChaosCluster) -> None:
    """After an idle time the receiver once never got its "done". Idle for longer than the life
    of a registration (3 s), the silence on a connection (3 s) and the pause of a transport."""
    bodies = [LONG | {"prompt": f"{i} {LONG['prompt']}", "max_tokens": 8} for i in range(10)]
    warm = [body | {"cache_salt": "kept"} for body in bodies]
    before = [await cluster.ask(**body) for body in warm]
    await asyncio.sleep(12)
    async with asyncio.timeout(NO_HANG_S):
        hot, cold = await asyncio.gather(ask_all(cluster, warm), ask_all(cluster, bodies))
    for answers in (hot, cold):
        for answer, wanted in zip(answers, before, strict=True):
            assert_same(answer, wanted)
    await cluster.wait_at_rest()


async def ask_all(cluster: ChaosCluster, bodies: list[dict[str, Any]]) -> list[Answer]:
    return await asyncio.gather(*(cluster.ask(**body) for body in bodies))
