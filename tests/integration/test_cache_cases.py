"""Prefix cache and paged KV as public bug reports broke them, each in bf16 and in int8."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from baton.store import StoredModel
from tests.support.answers import Answer
from tests.support.cluster import COMPLETIONS, Cluster, running_cluster
from tests.support.tiny_chat import write_tiny_chat

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

BLOCK = 16
KINDS = ["auto", "int8"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    """Its heads are wide enough for the bf16 kernels, which do not depend on the batch."""
    path: Path = tmp_path_factory.mktemp("cases")
    return write_tiny_chat(path, hidden_size=64)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"dtype": "bfloat16", "kv_dtype": request.param, "block_size": BLOCK}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(model: StoredModel, kind: dict[str, Any]) -> AsyncIterator[Cluster]:
    async with running_cluster(model, **kind) as running:
        yield running


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(32, 127), k=length)


async def ask(cluster: Cluster, prompt: Any, **body: Any) -> Answer:
    own = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": 5}
    return await cluster.ask(COMPLETIONS, prompt=prompt, **{**own, **body})


def assert_same(answers: Sequence[Answer]) -> None:
    first = answers[0]
    for answer in answers[1:]:
        assert answer.texts == first.texts and answer.tokens == first.tokens
        pairs = zip(answer.choices[0].logprobs, first.choices[0].logprobs, strict=True)
        assert all(abs(a - b) < 0.05 for a, b in pairs)


async def test_prompts_of_whole_blocks_fully_cached_compute_their_last_token(
    cluster: Cluster,
) -> None:
    for length in (k * BLOCK + i for k in (1, 2, 4) for i in (-1, 0, 1)):
        answers = [await ask(cluster, prompt_of(length, length), max_tokens=5) for _ in range(3)]
        assert_same(answers)
        assert [answer.num_cached for answer in answers[1:]] == [(length - 1) // BLOCK * BLOCK] * 2
    await cluster.settle()


async def test_a_repeated_prompt_has_the_same_probabilities(cluster: Cluster) -> None:
    assert_same([await ask(cluster, "Hello there", max_tokens=1) for _ in range(6)])


async def test_cached_and_uncached_runs_are_equal(
    cluster: Cluster, model: StoredModel, kind: dict[str, Any]
) -> None:
    prompts = [prompt_of(512, seed) for seed in range(6)]
    runs = [[await ask(cluster, p, max_tokens=32) for p in prompts] for _ in range(2)]
    async with running_cluster(model, enable_prefix_cache=False, **kind) as plain:
        runs.append([await ask(plain, p, max_tokens=32) for p in prompts])
        assert {answer.num_cached for answer in runs[2]} == {0}
    assert {answer.num_cached for answer in runs[1]} == {496}
    for answers in zip(*runs, strict=True):
        assert_same(answers)


async def test_no_hit_across_salts_and_policies_and_a_hit_on_a_repeat(cluster: Cluster) -> None:
    prompt = prompt_of(100, 77)
    wide = "streaming(sinks=4,window=1000)"
    identities: list[dict[str, Any]] = [
        {},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"kv_policy": wide},
        {"kv_policy": wide, "cache_salt": "a"},
        {"kv_policy": "snapkv(budget=90,window=16)"},
    ]
    first = [(await ask(cluster, prompt, **identity)).num_cached for identity in identities]
    again = [(await ask(cluster, prompt, **identity)).num_cached for identity in identities]
    assert first == [0] * 6
    assert again == [96] * 5 + [80]  # the observing window is always computed
    for salt in ("", 7):
        response = await cluster.post(COMPLETIONS, prompt=prompt, cache_salt=salt)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "cache_salt"
    await cluster.settle()


async def test_turns_that_end_within_a_block_continue_as_from_cold(
    cluster: Cluster, model: StoredModel, kind: dict[str, Any]
) -> None:
    turn = prompt_of(2 * BLOCK + 3, 5)
    turns = [turn]
    for seed in range(2):
        answer = await ask(cluster, turns[-1])
        turns.append([*turns[-1], *answer.texts[0].encode()[:6], *prompt_of(9, seed)])
    turns.append([*turn, *prompt_of(20, 9)])
    async with running_cluster(model, enable_prefix_cache=False, **kind) as plain:
        for prompt in turns:
            assert_same([await ask(cluster, prompt), await ask(plain, prompt)])


async def test_what_is_evicted_between_look_up_and_use_is_computed_again(
    model: StoredModel, kind: dict[str, Any]
) -> None:
    prefixes = [prompt_of(8 * BLOCK, seed) for seed in range(6)]
    async with running_cluster(model, num_blocks=26, **kind) as small:
        wanted = [(await ask(small, prefix)).texts for prefix in prefixes]
        order = random.Random(1).choices(range(6), k=36)
        room = asyncio.Semaphore(12)

        async def again(index: int) -> None:
            async with room:
                assert (await ask(small, prefixes[index])).texts == wanted[index]

        await asyncio.gather(*map(again, order))
        await small.settle()


async def test_what_can_never_fit_is_refused_at_once_and_blocks_nobody(
    model: StoredModel, kind: dict[str, Any]
) -> None:
    async with running_cluster(model, num_blocks=50, **kind) as small:
        for length, max_tokens in ((1002, 8), (700, 200)):
            body = {"prompt": prompt_of(length), "max_tokens": max_tokens}
            async with asyncio.timeout(20):
                response = await small.post(COMPLETIONS, **body)
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "context_length_exceeded"
        answers = await asyncio.gather(*(ask(small, prompt_of(20, i)) for i in range(5)))
        assert all(answer.counts[1] == 8 for answer in answers)
        await small.settle()


async def test_two_requests_that_each_want_most_of_a_pool_keep_their_text(
    model: StoredModel, kind: dict[str, Any]
) -> None:
    """The newest tokens of an int8 cache take further blocks."""
    num_blocks = 10 if kind["kv_dtype"] == "auto" else 14
    prompts = [prompt_of(3 * BLOCK, seed) for seed in (1, 2)]
    async with running_cluster(
        model, decode={"num_blocks": num_blocks}, enable_prefix_cache=False, **kind
    ) as small:
        body = {"max_tokens": 4 * BLOCK - 1}
        alone = [await ask(small, prompt, **body) for prompt in prompts]
        together = await asyncio.gather(*(ask(small, prompt, **body) for prompt in prompts))
        for one, other in zip(alone, together, strict=True):
            assert one.texts == other.texts and one.counts == other.counts
        await small.settle()
