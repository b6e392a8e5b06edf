"""Every ledger against the client's own stopwatch, over real workers of a real model shape.

The tolerance is 1 % or 2 ms, plus how late the shared event loop was: client, router and
workers live in this process, and a busy machine must not decide the test.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from baton.engine.async_engine import EngineFailed
from baton.store import StoredModel
from decode_service.worker import DecodeWorker, GenerateJob, Stepped
from tests.support.cluster import COMPLETIONS, Cluster, ClusterWorker, running_cluster
from tests.support.gateway import until
from tests.support.stopwatch import Timed, timed_post

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Turns of the event loop that a request takes outside of its ledger: accept, read, parse, start.
CROSSINGS = 4
LOST = 13
ORDER = [
    "receive",
    "tokenise",
    "admission",
    "placement",
    "reserve",
    "prefill_queue",
    "prefill",
    "kv_transfer",
    "decode_admit",
    "first_decode_step",
    "decode_step",
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tiny_chat: StoredModel) -> AsyncIterator[Cluster]:
    async with running_cluster(
        tiny_chat, prefills=2, decodes=2, router={"ledger_recent": 1000}
    ) as running:
        yield running


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(5, 200) for _ in range(length)]


def body(prompt: list[int], **values: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "stream": True, **values}


def slow_down(worker: ClusterWorker, step_s: float) -> None:
    """Each step of the worker takes so much longer."""
    runner = worker.parts.engine._runner
    run = runner.run

    def run_slowly(batch: Any) -> Any:
        time.sleep(step_s)
        return run(batch)

    runner.run = run_slowly


def counted(timing: dict[str, Any]) -> list[dict[str, Any]]:
    return [phase for phase in timing["phases"] if not phase["overlapped"]]


def assert_tiled(timing: dict[str, Any]) -> None:
    """In order, without gap, without overlap beyond what is marked."""
    at = 0.0
    for phase in counted(timing):
        assert phase["start_ms"] == pytest.approx(at, abs=0.001) and phase["duration_ms"] >= 0
        at = phase["start_ms"] + phase["duration_ms"]
    assert at == pytest.approx(timing["total_ms"], abs=0.01)


def assert_agrees(timed: Timed, ledger: dict[str, Any]) -> None:
    """The ledger and the client's stopwatch."""
    elapsed, total = timed.elapsed_s * 1e3, ledger["timing"]["total_ms"]
    tolerance = max(0.01 * elapsed, 2.0) + CROSSINGS * 1e3 * timed.lag_s
    assert abs(elapsed - total) <= tolerance, (timed.request_id, elapsed, total, timed.lag_s)


async def send(cluster: Cluster, name: str, request: dict[str, Any], **more: Any) -> Timed:
    return await timed_post(cluster.port, COMPLETIONS, request, name, **more)


async def ledger_of(cluster: Cluster, name: str) -> dict[str, Any]:
    await until(lambda: cluster.gateway.ledgers.recent.find(name) is not None)
    response = await cluster.client.get(f"/v1/requests/{name}")
    found: dict[str, Any] = response.json()
    return found


async def check(cluster: Cluster, name: str, request: dict[str, Any], **more: Any) -> Any:
    timed = await send(cluster, name, request, **more)
    ledger = await ledger_of(cluster, name)
    assert_tiled(ledger["timing"])
    assert_agrees(timed, ledger)
    return ledger


async def test_a_cold_request_shows_every_phase_in_order(cluster: Cluster) -> None:
    ledger = await check(cluster, "cold", body(prompt(random.Random(1), 150)))
    names = [phase["name"] for phase in counted(ledger["timing"])]
    firsts = [names.index(name) for name in ORDER if name in names]
    assert firsts == sorted(firsts), names
    everything = {phase["name"] for phase in ledger["timing"]["phases"]}
    everything.add("decode_admit")  # none when the engine takes the sequence up at once
    assert everything >= set(ORDER) | {"detokenise", "flush", "client_wait"}
    # A busy router's own work may hide some of them.
    steps = [p for p in ledger["timing"]["phases"] if p["name"].endswith("decode_step")]
    assert len({step["context"] for step in steps}) >= 7
    chunks = [p for p in ledger["timing"]["phases"] if p["name"] == "prefill"]
    assert {c["context"] for c in chunks} == {64, 128, 150}
    transfer = ledger["timing"]["transfer"]
    assert transfer["blocks"] == 10 and transfer["bytes"] > 0 and transfer["transports"]
    clocks = {clock["where"]: clock for clock in ledger["timing"]["clocks"]}
    assert set(clocks) == {*ledger["prefill"], *ledger["decode"]}
    # One process, one clock: the estimate must be right within what it claims.
    for clock in clocks.values():
        assert abs(clock["offset_ms"]) <= clock["error_ms"] + 0.01


async def test_a_warm_request_computes_less_and_says_so(cluster: Cluster) -> None:
    request = body(prompt(random.Random(2), 150))
    cold = [await check(cluster, f"first-{i}", request) for i in range(2)]
    warm = await check(cluster, "again", request)
    assert cold[0]["cached_tokens"] == 0 and warm["cached_tokens"] == 144
    computed = sum(
        phase["tokens"]
        for phase in warm["timing"]["phases"]
        if phase["name"] == "prefill" and not phase["overlapped"]
    )
    assert computed == 6


async def test_one_token_needs_no_decode_and_no_transfer(cluster: Cluster) -> None:
    ledger = await check(cluster, "single", body(prompt(random.Random(3), 40), max_tokens=1))
    assert ledger["decode"] == [] and ledger["timing"]["transfer"] is None
    assert ledger["timing"]["tpot_ms"] is None and ledger["timing"]["ttft_ms"] > 0


async def test_a_client_that_leaves_has_a_ledger_of_what_it_saw(cluster: Cluster) -> None:
    request = body(prompt(random.Random(4), 60), max_tokens=150)
    ledger = await check(cluster, "left", request, leave_after_bytes=2000)
    assert ledger["status"] == 499 and 0 < ledger["output_tokens"] < 150
    await cluster.settle()


async def test_decode_that_prefills_by_itself_shows_its_chunks(tiny_chat: StoredModel) -> None:
    router = {"decode_prefills": "fallback"}
    async with running_cluster(tiny_chat, prefills=0, decodes=1, router=router) as alone:
        ledger = await check(alone, "alone", body(prompt(random.Random(5), 150)))
    phases = ledger["timing"]["phases"]
    chunks = [phase for phase in phases if phase["name"] == "prefill"]
    assert {chunk["where"] for chunk in chunks} == {"decode-0"}
    assert {c["context"] for c in chunks} == {64, 128, 150}
    assert ledger["prefill"] == [] and ledger["timing"]["transfer"] is None


async def test_a_request_that_moves_keeps_one_timeline(tiny_chat: StoredModel) -> None:
    async with running_cluster(tiny_chat, prefills=1, decodes=2) as moving:
        lost = moving.decodes[0]
        slow_down(lost, 0.015)
        request = body(prompt(random.Random(6), 60), max_tokens=180)
        sending = asyncio.create_task(send(moving, "moved", request))
        await until(lambda: lost.parts.engine.tokens_generated > 5)
        await lost.stop()
        timed = await sending
        ledger = await ledger_of(moving, "moved")
    assert_tiled(ledger["timing"])
    assert_agrees(timed, ledger)
    assert ledger["output_tokens"] == 180 and len(ledger["decode"]) == 2
    names = [phase["name"] for phase in counted(ledger["timing"])]
    assert "migration" in names
    again = [p for p in ledger["timing"]["phases"] if p["name"] == "prefill" and "attempt" in p]
    assert again and all(phase["attempt"] == 2 for phase in again)


class Asked(NamedTuple):
    kind: str
    body: dict[str, Any]
    leave_after_bytes: int = 0


def mixed(rng: random.Random, count: int) -> list[Asked]:
    shared = prompt(rng, 96)
    makers = [
        lambda: Asked("cold", body(prompt(rng, rng.randrange(8, 60)))),
        lambda: Asked("warm", body(shared + prompt(rng, 8))),
        lambda: Asked("long", body(prompt(rng, 400), max_tokens=24)),
        lambda: Asked("two choices", body(prompt(rng, 50), n=2)),
        lambda: Asked("whole", body(prompt(rng, 30), stream=False)),
        lambda: Asked("one token", body(prompt(rng, 30), max_tokens=1)),
        lambda: Asked("left", body(prompt(rng, 30), max_tokens=150), leave_after_bytes=1500),
        lambda: Asked("migrated", body(prompt(rng, 40), max_tokens=16, seed=LOST)),
        lambda: Asked("decode only", body(prompt(rng, rng.randrange(8, 150)))),
    ]
    return [makers[i % len(makers)]() for i in range(count)]


@pytest.fixture
def decode_loses_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode gives requests of the seed LOST up after three steps; they go on on another worker."""
    generate = DecodeWorker.generate

    async def give_up(self: DecodeWorker, job: GenerateJob) -> AsyncIterator[Any]:
        steps = 0
        async with contextlib.aclosing(generate(self, job)) as events:
            async for event in events:
                yield event
                steps += isinstance(event, Stepped)
                if steps == 3 and job.sampling.seed == LOST and not job.output:
                    raise EngineFailed("on purpose")

    monkeypatch.setattr(DecodeWorker, "generate", give_up)


async def run_mixed(cluster: Cluster, alone: Cluster, count: int, at_once: int, seed: int) -> None:
    """`alone` has no prefill worker."""
    gate = asyncio.Semaphore(at_once)

    async def one(i: int, asked: Asked) -> None:
        asking = alone if asked.kind == "decode only" else cluster
        more = {"leave_after_bytes": asked.leave_after_bytes}
        async with gate:
            ledger = await check(asking, f"mixed-{seed}-{i}", asked.body, **more)
        names = {phase["name"] for phase in ledger["timing"]["phases"]}
        assert ("migration" in names) == (asked.kind == "migrated"), (asked.kind, names)
        assert bool(ledger["prefill"]) == (asked.kind != "decode only"), asked.kind

    async with asyncio.TaskGroup() as group:
        for i, asked in enumerate(mixed(random.Random(seed), count)):
            group.create_task(one(i, asked))
    for each in (cluster, alone):
        await each.settle()


@pytest.mark.slow
@pytest.mark.usefixtures("decode_loses_some")
@pytest.mark.parametrize(("count", "at_once"), [(45, 4), (207, 6)])
async def test_mixed_requests_sum_to_the_clients_stopwatch(
    cluster: Cluster, tiny_chat: StoredModel, count: int, at_once: int
) -> None:
    router = {"decode_prefills": "fallback", "ledger_recent": 1000}
    async with running_cluster(tiny_chat, prefills=0, decodes=1, router=router) as alone:
        await run_mixed(cluster, alone, count, at_once, seed=count)
