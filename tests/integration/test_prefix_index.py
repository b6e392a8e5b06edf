"""The prefix index on a real Redis: what workers publish is what routers find, by life."""

import dataclasses
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from baton.cluster.prefix_index import PromptBlocks
from baton.cluster.prefix_index.index import LOOKUP_TIMEOUT_S
from baton.cluster.prefix_index.matches import key_of
from baton.cluster.prefix_index.store import CHUNK, PERIOD_S
from baton.cluster.redis_client import answer
from baton.cluster.redis_server import EmbeddedRedis
from tests.support.prefix_index import IndexedCluster, indexed_cluster, prompt_of
from tests.support.redis import LAYOUT, eventually, make_record, until_equal
from tests.support.redis_servers import redis_7, redis_cluster


@pytest.fixture
async def cluster(redis_server: tuple[EmbeddedRedis, str]) -> AsyncIterator[IndexedCluster]:
    async with indexed_cluster(redis_server[1]) as cluster:
        yield cluster


@pytest.fixture
async def client(redis_server: tuple[EmbeddedRedis, str]) -> AsyncIterator[Redis]:
    async with Redis.from_url(redis_server[1]) as client:
        yield client


async def test_a_lookup_finds_how_much_of_a_prompt_each_worker_holds(
    cluster: IndexedCluster,
) -> None:
    prompt, lengths = prompt_of(100), [0, 1, 2, 37, 63, 99, 100]
    for index, length in enumerate(lengths):
        worker = await cluster.add(f"prefill-{index}")
        worker.store(prompt_of(5, seed=9))
        worker.store(prompt, length)
    await cluster.until_held(prompt, *lengths)
    assert await cluster.held(prompt_of(5, seed=9)) == [5] * len(lengths)
    assert await cluster.held(prompt_of(5, seed=8)) == [0] * len(lengths)


async def test_a_lookup_is_one_round_trip_however_many_blocks_and_workers(
    cluster: IndexedCluster, client: Redis
) -> None:
    prompt = prompt_of(512)
    for index in range(8):
        (await cluster.add(f"decode-{index}")).store(prompt, 64 * index)
    await cluster.until_held(prompt, *range(0, 512, 64))
    for worker in cluster.workers:
        await worker.publisher.stop()
    before = (await client.info("commandstats"))["cmdstat_evalsha"]["calls"]
    probes = (await client.info("commandstats"))["cmdstat_sismember"]["calls"]
    await cluster.held(prompt)
    stats = await client.info("commandstats")
    assert stats["cmdstat_evalsha"]["calls"] == before + 1
    assert stats["cmdstat_sismember"]["calls"] - probes <= 8 * (1 + 9)  # not 8 x 512


async def test_evicted_blocks_are_no_longer_found(cluster: IndexedCluster) -> None:
    worker, prompt = await cluster.add(), prompt_of(20)
    worker.store(prompt)
    await cluster.until_held(prompt, 20)
    worker.evict(prompt, 7)
    await cluster.until_held(prompt, 7)


async def test_what_an_eviction_leaves_behind_without_its_beginning_is_not_found(
    cluster: IndexedCluster,
) -> None:
    worker, prompt = await cluster.add(), prompt_of(20)
    worker.store(prompt)
    await cluster.until_held(prompt, 20)
    hashes = prompt.hashes(LAYOUT)
    worker.cache.evict(hashes[:1])
    worker.publisher.news()
    await cluster.until_held(prompt, 0)
    worker.cache.store(hashes[:1])
    worker.publisher.news()
    await cluster.until_held(prompt, 20)


async def test_tenants_models_and_block_sizes_are_apart(cluster: IndexedCluster) -> None:
    prompt, salted = prompt_of(8), prompt_of(8, salt="tenant")
    small = dataclasses.replace(LAYOUT, block_size=4)
    other = dataclasses.replace(LAYOUT, fingerprint="other")
    packed = dataclasses.replace(LAYOUT, dtype="int8")
    for index, layout in enumerate((LAYOUT, small, other, packed)):
        (await cluster.add(f"prefill-{index}", layout=layout)).store(prompt)
    await cluster.until_held(prompt, 8, 8, 8, 8)  # in blocks of 16 tokens
    assert await cluster.held(salted) == [0, 0, 0, 0]
    impostor = dataclasses.replace(cluster.workers[2].record, layout=LAYOUT)
    assert not (await cluster.index.lookup(prompt, [impostor])).held


async def test_a_restarted_worker_starts_with_nothing(cluster: IndexedCluster) -> None:
    """volcano-sh/kthena#1428: the same name, an empty cache, and Redis still vouched for it."""
    old, prompt = await cluster.add("prefill-0"), prompt_of(6)
    holder = await cluster.add("prefill-1")
    old.store(prompt)
    holder.store(prompt)
    await cluster.until_held(prompt, 6, 6)
    reborn = make_record("prefill-0")
    matches = await cluster.index.lookup(prompt, [reborn, holder.record])
    assert matches.expected_tokens(reborn) == 0
    assert matches.expected_tokens(holder.record) == 96


async def test_a_worker_that_leaves_or_dies_leaves_no_keys_and_no_late_event_brings_them_back(
    cluster: IndexedCluster, client: Redis
) -> None:
    """llm-d/llm-d-router#1736: entries of removed workers stayed for ever."""
    prompt = prompt_of(6)
    workers = [await cluster.add(f"prefill-{index}", lease_s=0.5) for index in range(3)]
    for worker in workers:
        worker.store(prompt)
    await cluster.until_held(prompt, 6, 6, 6)
    await workers[0].publisher.stop()
    task = workers[1].publisher._task
    assert task is not None
    task.cancel()  # it dies without a word

    async def left() -> set[str]:
        return {key.decode().split(":")[2] for key in await client.keys("{baton}:held:*")}

    assert "prefill-0" not in await left()
    await until_equal(left, {"prefill-2"})
    for worker in workers[:2]:
        late = cluster.store.change(key_of(worker.record), (1, 2), (), prompt.hashes(LAYOUT), 60)
        assert await answer(late) == 0
    assert await left() == {"prefill-2"}


async def test_an_emptied_redis_is_filled_again_without_a_restart(
    cluster: IndexedCluster, client: Redis
) -> None:
    worker, prompt = await cluster.add(), prompt_of(CHUNK + 10)
    worker.store(prompt)
    await cluster.until_held(prompt, CHUNK + 10)
    await client.flushall()
    await cluster.until_held(prompt, CHUNK + 10)


async def test_lost_events_are_made_good_by_a_snapshot(cluster: IndexedCluster) -> None:
    worker, prompt, other = await cluster.add(), prompt_of(10), prompt_of(4, seed=2)
    worker.store(prompt)
    await cluster.until_held(prompt, 10)
    worker.evict(prompt, 3)
    worker.store(other)
    worker.cache.lose_events()
    await cluster.until_held(prompt, 3)
    assert await cluster.held(other) == [4]


async def test_a_lost_batch_is_noticed_by_its_number_and_made_good(
    cluster: IndexedCluster, client: Redis
) -> None:
    worker, prompt = await cluster.add(), prompt_of(10)
    worker.store(prompt, 4)
    await cluster.until_held(prompt, 4)
    worker.publisher._number += 1  # as if one batch had never arrived
    worker.store(prompt)
    await cluster.until_held(prompt, 10)


async def test_blocks_of_a_routed_request_count_at_once_and_expire_if_they_never_come(
    cluster: IndexedCluster, client: Redis
) -> None:
    chosen, _ = await cluster.add("prefill-0"), await cluster.add("prefill-1")
    prompt = prompt_of(12)
    await cluster.until_held(prompt, 0, 0)
    cluster.route(prompt, chosen)
    await until_equal(lambda: cluster.expected(prompt), [12, 0])
    assert await cluster.held(prompt) == [0, 0]
    sibling = type(prompt)([*prompt._token_ids[:100], *range(500)])
    assert await cluster.expected(sibling) == [6, 0]
    keys = await client.keys("{baton}:coming:*")
    assert len(keys) == 2
    for key in keys:
        assert 0 < await client.ttl(key) <= 2 * PERIOD_S
        await client.pexpire(key, 1)
    await until_equal(lambda: cluster.expected(prompt), [0, 0])


async def test_a_prompt_that_is_being_placed_counts_before_redis_knows_of_it(
    cluster: IndexedCluster,
) -> None:
    chosen, prompt = await cluster.add("prefill-0"), prompt_of(12)
    await cluster.until_held(prompt, 0)
    with cluster.index.expecting(prompt, [chosen.record]):
        assert await cluster.expected(prompt) == [12]
        assert await cluster.expected(prompt_of(12, seed=1)) == [0]
    assert await cluster.expected(prompt) == [12]


async def test_a_choice_that_is_taken_back_counts_no_more(cluster: IndexedCluster) -> None:
    chosen, prompt = await cluster.add("prefill-0"), prompt_of(12)
    await cluster.until_held(prompt, 0)
    with pytest.raises(LookupError), cluster.index.expecting(prompt, [chosen.record]):
        raise LookupError("another router was quicker")
    assert await cluster.expected(prompt) == [0]


async def test_prompts_of_one_key_are_drawn_to_one_worker_until_something_is_cached(
    cluster: IndexedCluster,
) -> None:
    workers = [await cluster.add(f"prefill-{index}") for index in range(4)]

    def keyed(seed: int, key: str) -> PromptBlocks:
        return PromptBlocks([seed * 1000 + n for n in range(200)], cache_key=key)

    drawn = [await cluster.expected(keyed(seed, "k")) for seed in range(5)]
    assert sorted(drawn[0]) == [0, 0, 0, 1] and drawn == [drawn[0]] * 5
    others = [await cluster.expected(keyed(0, f"key {n}")) for n in range(20)]
    assert {tuple(counts) for counts in others} > {tuple(drawn[0])}
    elsewhere = drawn[0].index(0)
    workers[elsewhere].store(keyed(7, "k"), 3)
    found = [3 if place == elsewhere else 0 for place in range(4)]
    await until_equal(lambda: cluster.expected(keyed(7, "k")), found)


async def test_predictions_for_one_worker_are_bounded_by_what_it_can_hold(
    cluster: IndexedCluster, client: Redis
) -> None:
    worker = await cluster.add(num_blocks=30)
    for seed in range(50):
        cluster.route(prompt_of(10, seed), worker)

    async def noted() -> int:
        keys = await client.keys("{baton}:coming:*:*")
        return sum([await client.scard(key) for key in keys])

    await until_equal(noted, 30)


async def test_memory_in_redis_is_bounded_by_the_blocks_that_exist(
    cluster: IndexedCluster, client: Redis
) -> None:
    """vllm-project/production-stack#687: the index grew with every distinct prompt."""
    worker, pool = await cluster.add(), 256
    previous = None
    sizes = []
    for seed in range(400):
        prompt = prompt_of(64, seed)
        worker.store(prompt)
        if len(worker.cache.blocks) > pool:
            assert previous is not None
            oldest = list(worker.cache.blocks)[: len(worker.cache.blocks) - pool]
            worker.cache.evict(oldest)
        previous = prompt
        if seed % 100 == 99:
            await cluster.until_held(prompt, 64)
            keys = await client.keys("*held*")
            sizes.append(sum([await client.scard(key) for key in keys]))
    assert sizes == [pool + 1] * 4
    assert len(worker.publisher._blocks.visible) == pool


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGSTOP])
async def test_without_redis_lookups_end_at_once_and_return_when_it_is_back(
    redis_server: tuple[EmbeddedRedis, str], stop: signal.Signals
) -> None:
    server, url = redis_server
    async with indexed_cluster(url, lookup_timeout_s=LOOKUP_TIMEOUT_S) as cluster:
        worker, prompt = await cluster.add(), prompt_of(10)
        worker.store(prompt)
        await cluster.until_held(prompt, 10)
        os.kill(server.pid or 0, stop)
        probes = 0
        for _ in range(100):
            probes += cluster.index.healthy
            matches = await cluster.index.lookup(prompt, [worker.record])
            assert not matches.available and not matches.held
            assert matches.expected_tokens(worker.record) == 160  # the guess: the only one
        assert probes == 1  # the others did not ask
        if stop is signal.SIGSTOP:
            os.kill(server.pid or 0, signal.SIGCONT)
        else:
            await server.stop()
            await server.start(int(url.rsplit(":", 1)[1].split("/")[0]))
        await eventually(lambda: cluster.index.healthy)
        await cluster.until_held(prompt, 10)


@pytest.mark.parametrize(
    ("break_it", "mend_it"),
    [
        (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
        pytest.param(
            ("REPLICAOF", "127.0.0.1", "1"),
            ("REPLICAOF", "NO", "ONE"),
            marks=redis_7,  # an older replica's scripts see keys that have expired
        ),
    ],
    ids=["out of memory", "read-only"],
)
async def test_a_redis_that_takes_no_writes_forgets_and_then_learns_again(
    cluster: IndexedCluster, client: Redis, break_it: tuple[str, ...], mend_it: tuple[str, ...]
) -> None:
    worker, prompt = await cluster.add(lease_s=1.0), prompt_of(10)
    worker.store(prompt, 5)
    await cluster.until_held(prompt, 5)
    await client.execute_command(*break_it)
    worker.store(prompt)
    cluster.route(prompt, worker)
    # The lease cannot be renewed with what is true, so what is no longer vouched for ends.
    await cluster.until_held(prompt, 0)
    assert cluster.index.healthy
    await client.execute_command(*mend_it)
    await cluster.until_held(prompt, 10)


@redis_7
async def test_the_index_works_in_a_redis_cluster(tmp_path: Path) -> None:
    async with redis_cluster(tmp_path) as url, indexed_cluster(url) as cluster:
        worker, prompt = await cluster.add(), prompt_of(10)
        worker.store(prompt, 4)
        # The first call reads the cluster's map, which may take longer than a look-up waits.
        await cluster.until_held(prompt, 4)
        cluster.route(prompt, worker)
        await until_equal(lambda: cluster.expected(prompt), [10])


async def test_a_short_prompt_asks_nobody(cluster: IndexedCluster, client: Redis) -> None:
    await eventually(lambda: cluster.index.healthy)  # on a busy machine Redis may seem away
    before = (await client.info("stats"))["total_commands_processed"]
    matches = await cluster.index.lookup(prompt_of(0), [make_record()])
    assert matches.available and not matches.held
    assert (await client.info("stats"))["total_commands_processed"] == before + 1  # ours
