"""What the index says of real workers is what they then find in their caches."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from baton.cluster.prefix_index import PrefixIndex, PrefixMatches, PrefixStore, PromptBlocks
from baton.cluster.redis_link import RedisLink
from baton.cluster.workers import Role, WorkerRecord
from baton.step_totals import StepTotals, chunk_attention
from baton.store import StoredModel
from tests.integration.test_cluster_ledger import body, prompt
from tests.support.cluster import COMPLETIONS, Cluster, ClusterWorker, running_cluster
from tests.support.redis import eventually, until, until_equal

TOKEN_S = 0.002
PROMPT = list(range(20, 120))  # 6 full blocks of 16 and a rest


@pytest.fixture
async def cluster(tiny_chat: StoredModel) -> AsyncIterator[Cluster]:
    async with running_cluster(tiny_chat) as cluster:
        yield cluster


@pytest.fixture
async def index(cluster: Cluster) -> AsyncIterator[PrefixIndex]:
    link = RedisLink(cluster.redis_url)
    yield PrefixIndex(link, PrefixStore(link.client), lookup_timeout_s=2.0)
    await link.close()


async def lookup(cluster: Cluster, index: PrefixIndex, prompt: list[int]) -> PrefixMatches:
    return await index.lookup(PromptBlocks(prompt), cluster.gateway.directory.snapshot())


async def test_both_workers_of_a_request_are_known_to_hold_its_prompt(
    cluster: Cluster, index: PrefixIndex
) -> None:
    async def held() -> list[int]:
        matches = await lookup(cluster, index, PROMPT)
        return [matches.held_tokens(w) for w in cluster.gateway.directory.snapshot()]

    await cluster.ask(COMPLETIONS, prompt=PROMPT, max_tokens=4, ignore_eos=True)
    await until_equal(held, [96, 96])
    again = await cluster.ask(COMPLETIONS, prompt=PROMPT, max_tokens=4, ignore_eos=True)
    assert again.usage["prompt_tokens_details"]["cached_tokens"] == 96


async def test_decode_is_known_to_hold_what_it_generated_as_well(
    cluster: Cluster, index: PrefixIndex
) -> None:
    answer = await cluster.ask(
        COMPLETIONS, prompt=PROMPT, max_tokens=40, ignore_eos=True, temperature=0, logprobs=0
    )
    assert answer.usage["completion_tokens"] == 40
    decode = next(w for w in cluster.gateway.directory.snapshot() if w.role == "decode")
    blocks = cluster.decodes[0].blocks

    async def published() -> bool:
        hashes = {digest for digest, _ in blocks.published()}
        members = await index._link.client.smembers(
            f"{{baton}}:held:{decode.worker_id}:{decode.incarnation}"
        )
        return len(hashes) == 8 and hashes == {m for m in members if len(m) == 16}

    await until(published)  # (100 + 40 - 1) // 16 blocks


async def test_blocks_that_the_pool_needs_again_leave_the_index(
    tiny_chat: StoredModel,
) -> None:
    async with running_cluster(tiny_chat, num_blocks=16) as cluster:
        link = RedisLink(cluster.redis_url)
        index = PrefixIndex(link, PrefixStore(link.client), lookup_timeout_s=2.0)
        await cluster.ask(COMPLETIONS, prompt=PROMPT, max_tokens=2, ignore_eos=True)

        async def held() -> list[int]:
            matches = await lookup(cluster, index, PROMPT)
            return [matches.held_tokens(w) for w in cluster.gateway.directory.snapshot()]

        await until_equal(held, [96, 96])
        for start in (200, 400, 600):
            other = [token % 250 for token in range(start, start + 150)]
            await cluster.ask(COMPLETIONS, prompt=other, max_tokens=2, ignore_eos=True)
        caches = [w.blocks for w in cluster.workers]
        expected = [16 * _matched(blocks, cluster) for blocks in reversed(caches)]
        assert expected != [96, 96]
        await until_equal(held, expected)
        await link.close()


def _is_alive_again(cluster: Cluster, known: Sequence[WorkerRecord]) -> bool:
    workers = cluster.gateway.directory.snapshot()
    old = {worker.incarnation for worker in known if worker.role is Role.PREFILL}
    return len(workers) == 2 and not old & {worker.incarnation for worker in workers}


def _matched(blocks: object, cluster: Cluster) -> int:
    layout = cluster.gateway.directory.snapshot()[0].layout
    return len(blocks.match_prefix(PromptBlocks(PROMPT).reusable_hashes(layout)))  # type: ignore[attr-defined]


async def test_a_known_prefix_is_found_again_and_the_predicted_hit_is_the_reported_one(
    tiny_chat: StoredModel,
) -> None:
    async with running_cluster(tiny_chat, prefills=2, decodes=2) as cluster:
        body = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}
        await cluster.ask(COMPLETIONS, **body)
        index = cluster.gateway.shared.index
        assert index is not None
        index._lookup_timeout_s = 2.0  # a busy machine must not decide

        async def held() -> int:
            return len((await lookup(cluster, index, PROMPT)).held)

        await until_equal(held, 2)  # one of each role
        for _ in range(4):
            answer = await cluster.ask(COMPLETIONS, **body)
            assert answer.num_cached == 96
        totals = await cluster.totals(cluster.prefills)
        assert totals.prefill_tokens_computed == 100 + 4 * 4


async def test_a_restarted_worker_is_not_taken_for_the_one_that_had_the_prefix(
    tiny_chat: StoredModel,
) -> None:
    """volcano-sh/kthena#1428: after a restart under the same name it was still counted as a hit."""
    async with running_cluster(tiny_chat) as cluster:
        body = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}
        await cluster.ask(COMPLETIONS, **body)
        index = cluster.gateway.shared.index
        assert index is not None

        async def holders() -> set[str]:
            matches = await lookup(cluster, index, PROMPT)
            return {worker_id for worker_id, _ in matches.held}

        await until_equal(holders, {"prefill-0", "decode-0"})
        old = cluster.prefills.pop()
        old.task.cancel()  # without a word
        await asyncio.gather(old.task, return_exceptions=True)
        known = cluster.gateway.directory.snapshot()
        await cluster.add_prefill()  # takes the same name
        await eventually(lambda: _is_alive_again(cluster, known))
        await until_equal(holders, {"decode-0"})
        assert (await cluster.ask(COMPLETIONS, **body)).num_cached == 0
        assert (await cluster.ask(COMPLETIONS, **body)).num_cached == 96


def slow_down(worker: ClusterWorker, token_s: float) -> None:
    """Each token that the worker computes takes so much longer."""
    runner = worker.parts.engine._runner
    run = runner.run

    def run_slowly(batch: Any) -> Any:
        time.sleep(token_s * sum(item.num_new_tokens for item in batch.items))
        return run(batch)

    runner.run = run_slowly


def teach_speed(cluster: Cluster) -> None:
    """To the router, of both prefill workers alike: what it measured of four prompts on a busy
    machine made one of them look slow enough to compute a prompt again on the other."""
    predictor = cluster.gateway.planner.predictor
    for record in cluster.gateway.directory.snapshot():
        for length in [30, 60, 90, 120, 400] * 10 if record.role is Role.PREFILL else []:
            attended = chunk_attention(0, length)
            predictor.saw_steps(record, StepTotals(1, length, attended, 0, 0, TOKEN_S * length))


async def test_a_prompt_asked_for_many_times_at_once_is_computed_once(
    tiny_chat: StoredModel,
) -> None:
    """Who comes while it is being computed waits for that, rather than computing it elsewhere."""
    rng = random.Random(1)
    async with running_cluster(tiny_chat, prefills=2) as cluster:
        index = cluster.gateway.shared.index
        assert index is not None
        index._lookup_timeout_s = 2.0  # a busy machine must not decide
        for worker in cluster.prefills:
            slow_down(worker, TOKEN_S)
        await cluster.ask(COMPLETIONS, **body(prompt(rng, 30)))
        teach_speed(cluster)
        before = await cluster.totals(cluster.prefills)
        same = body(prompt(rng, 400))
        answers = await asyncio.gather(*(cluster.ask(COMPLETIONS, **same) for _ in range(6)))
        after = await cluster.totals(cluster.prefills)
    assert sorted(answer.num_cached for answer in answers) == [0] + [384] * 5
    computed = after.prefill_tokens_computed - before.prefill_tokens_computed
    assert computed == 400 + 5 * 16
