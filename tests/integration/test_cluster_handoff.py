"""Hand-offs end to end: the tokens are the offline ones, and nothing is computed or sent twice.

Real model in fp32 through router, prefill and decode; books and counters of the workers are
read directly.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest
import pytest_asyncio

from baton.engine.sampling_params import SamplingParams
from baton.store import StoredModel
from tests.golden.oracle import Oracle, assert_equal
from tests.support.cluster import COMPLETIONS, ORDINARY, Cluster, running_cluster

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

BLOCK = 16
CHUNK = 64
BYTES_PER_TOKEN = 46_080
GREEDY: dict[str, Any] = {"temperature": 0}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Cluster]:
    async with running_cluster() as cluster:
        await cluster.learn_the_usual()
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(shared: Cluster) -> AsyncIterator[Cluster]:
    await shared.wait_for_workers()
    yield shared
    await shared.assert_unharmed()


@contextlib.asynccontextmanager
async def small_cluster(**values: Any) -> AsyncIterator[Cluster]:
    """A cluster of its own for tests that need other settings."""
    async with running_cluster(**values) as cluster:
        await cluster.learn_the_usual()
        yield cluster
        await cluster.assert_unharmed()


async def offline(oracle: Oracle, prompt: list[int], **sampling: Any) -> Any:
    (expected,) = await oracle.expected([prompt], SamplingParams(**{"temperature": 0.0} | sampling))
    return expected


# --- the split changes nothing --------------------------------------------------------------


@pytest.mark.parametrize(
    "extra",
    [
        {"min_tokens": 10},
        {"n": 2, "temperature": 0.9},
        {"logprobs": 5},
        {"best_of": 2, "temperature": 0.9},
        {"echo": True},
        {"stop": "\n\n\n\n"},
    ],
    ids=str,
)
async def test_every_option_goes_through_the_split(
    cluster: Cluster, oracle: Oracle, extra: dict[str, Any]
) -> None:
    prompt = "List the planets of the solar system:"
    before = await cluster.totals(cluster.workers)
    body = {"prompt": prompt, "max_tokens": 20, "seed": 4, "temperature": 0} | extra
    answer = await cluster.ask(COMPLETIONS, **body)
    after = await cluster.totals(cluster.workers)
    assert after.handoffs - before.handoffs == 2, "counted once on either side"
    ids = oracle.tokenizer.encode(prompt)
    sampling = {"max_tokens": 20, "seed": 4, "temperature": body["temperature"]}
    choices = await offline(
        oracle,
        ids,
        **sampling,
        n=max(extra.get("n", 1), extra.get("best_of", 1)),
        min_tokens=extra.get("min_tokens", 0),
    )
    texts = [choice.text for choice in choices]
    if "best_of" in extra:
        means = [sum(choice.logprobs) / len(choice.logprobs) for choice in choices]
        texts = [texts[means.index(max(means))]]
    if "echo" in extra:
        texts = [prompt + text for text in texts]
    assert answer.texts == texts
    assert answer.counts[1] >= extra.get("min_tokens", 0)


async def assert_offline_text_of_repeated_words(
    cluster: Cluster, oracle: Oracle, max_tokens: int
) -> None:
    """A prompt that repeats itself: reading the cache at a wrong place gives other text."""
    words = oracle.tokenizer.encode("red green blue. " * 200)
    question = oracle.tokenizer.encode("\nQuestion: which colours were named above?\nAnswer:")
    prompts = []
    for length in (40 * BLOCK - 1, 40 * BLOCK, 40 * BLOCK + 1):
        prompts.append(words[: length - len(question)] + question)
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    expected = await oracle.expected(prompts, sampling)
    for _ in range(2):
        answers = await asyncio.gather(
            *(
                cluster.ask(COMPLETIONS, prompt=p, max_tokens=max_tokens, logprobs=0, **GREEDY)
                for p in prompts
            )
        )
        for answer, wanted in zip(answers, expected, strict=True):
            assert_equal(answer, wanted)


async def test_a_prompt_that_repeats_itself_continues_as_offline(
    cluster: Cluster, oracle: Oracle
) -> None:
    await assert_offline_text_of_repeated_words(cluster, oracle, 8)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["grpc", "shm", "torch"])
async def test_a_prompt_that_repeats_itself_continues_as_offline_on_every_transport(
    oracle: Oracle, transport: str
) -> None:
    async with small_cluster(transport=transport) as cluster:
        await assert_offline_text_of_repeated_words(cluster, oracle, 64)


@pytest.mark.slow  # the golden prompts have these lengths too
async def test_prompts_around_the_prefill_chunk_give_the_offline_text(
    cluster: Cluster, oracle: Oracle
) -> None:
    ids = oracle.tokenizer.encode(
        "The history of the lighthouse begins long before the lamp. " * 30
    )
    prompts = [ids[i : i + n] for i, n in enumerate((CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7))]
    expected = await oracle.expected(prompts, SamplingParams(temperature=0.0, max_tokens=8))
    for prompt, wanted in zip(prompts, expected, strict=True):
        answer = await cluster.ask(COMPLETIONS, prompt=prompt, max_tokens=8, logprobs=0, **GREEDY)
        assert_equal(answer, wanted)


async def test_four_choices_prefill_and_ship_the_prompt_once(
    cluster: Cluster, oracle: Oracle
) -> None:
    prompt = oracle.tokenizer.encode("My four favourite animals are very different. " * 20)[:88]
    before = [await cluster.totals(side) for side in (cluster.prefills, cluster.decodes)]
    (decode,) = cluster.decodes
    body = {"prompt": prompt, "n": 4, "temperature": 1.0, "seed": 11, "max_tokens": 24}
    request = asyncio.create_task(cluster.ask(COMPLETIONS, **body, logprobs=0, ignore_eos=True))
    peak = 0
    while not request.done():
        peak = max(peak, decode.blocks.num_blocks - decode.blocks.num_free)
        await asyncio.sleep(0.002)
    answer = await request
    after = [await cluster.totals(side) for side in (cluster.prefills, cluster.decodes)]
    assert after[0].prefill_tokens_computed - before[0].prefill_tokens_computed == 88
    for b, a in zip(before, after, strict=True):
        assert a.handoffs - b.handoffs == 1
        assert a.blocks_transferred - b.blocks_transferred == -(-88 // BLOCK)
    alone = -(-(88 + 24) // BLOCK)
    assert -(-88 // BLOCK) <= peak < 4 * alone
    assert len(set(answer.texts)) == 4
    sampling = {"temperature": 1.0, "seed": 11, "max_tokens": 24, "n": 4, "ignore_eos": True}
    assert_equal(answer, await offline(oracle, prompt, **sampling))


# --- full hits ------------------------------------------------------------------------------


async def repeat_and_vary(cluster: Cluster, count: int) -> None:
    """One prompt again and again, then as many different ones."""
    for prompt_of in (lambda i: [65] * 48, lambda i: [65 + i % 26, 97 + i // 26] + [99] * 40):
        before = await cluster.totals(cluster.decodes)
        for i in range(count):
            answer = await cluster.ask(
                COMPLETIONS, prompt=prompt_of(i), max_tokens=3, ignore_eos=True, **GREEDY
            )
            assert answer.counts[1] == 3
        await cluster.settle()
        after = await cluster.totals(cluster.decodes)
        assert after.handoffs - before.handoffs == count
    assert after.prefill_tokens_computed == 0


async def test_three_hundred_full_hits_and_three_hundred_misses_leak_nothing(
    tiny_chat: StoredModel,
) -> None:
    async with small_cluster(model=tiny_chat, num_blocks=64) as cluster:
        await repeat_and_vary(cluster, 300)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_three_hundred_full_hits_of_the_real_model_leak_nothing(cluster: Cluster) -> None:
    await repeat_and_vary(cluster, 300)


# --- sizes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mebibytes", [3.9, 4.1, pytest.param(64, marks=pytest.mark.slow)])
async def test_a_kv_cache_around_and_far_above_a_grpc_message_arrives_whole(
    oracle: Oracle, mebibytes: float
) -> None:
    length = int(mebibytes * 2**20 / BYTES_PER_TOKEN) + 1
    text = "In the year of the long winter the lake froze down to its floor. " * 120
    prompt = oracle.tokenizer.encode(text)[:length]
    assert len(prompt) == length
    async with small_cluster(transport="grpc", chunk_size=256) as cluster:
        assert cluster.prefills[0].parts.cache.layout.bytes_per_token == BYTES_PER_TOKEN
        answer = await cluster.ask(COMPLETIONS, prompt=prompt, max_tokens=8, logprobs=0, **GREEDY)
        sent = (await cluster.totals(cluster.prefills)).bytes_transferred
        assert sent >= length * BYTES_PER_TOKEN
        assert_equal(answer, await offline(oracle, prompt, max_tokens=8))


@pytest.mark.slow
async def test_a_long_hand_off_needs_little_memory_beside_the_pools(oracle: Oracle) -> None:
    """Pools of one prompt, touched by the first: a second 64 MiB cache only passes through."""
    async with small_cluster(transport="grpc", num_blocks=96) as cluster:
        ids = oracle.tokenizer.encode("One fish, two fish, red fish, blue fish. " * 200)[:1457]
        for i in range(2):
            await cluster.ask(COMPLETIONS, prompt=[100 + i, *ids], max_tokens=2, **GREEDY)
        process = psutil.Process()
        before = peak = process.memory_info().rss
        body = {"prompt": [200, *ids], "max_tokens": 2, **GREEDY}
        request = asyncio.create_task(cluster.ask(COMPLETIONS, **body))
        while not request.done():
            peak = max(peak, process.memory_info().rss)
            await asyncio.sleep(0.01)
        await request
        assert peak - before < 48 << 20, f"{(peak - before) >> 20} MiB beside the pools"


# --- pools ----------------------------------------------------------------------------------


async def test_a_request_that_can_never_fit_is_refused_at_once_and_blocks_nobody() -> None:
    async with small_cluster(num_blocks=50) as cluster:
        too_long = {"prompt": [100] * 1002, "max_tokens": 4}
        too_much = {"prompt": [100] * 780, "max_tokens": 100}
        short = [cluster.ask(COMPLETIONS, **ORDINARY) for _ in range(5)]
        refused, also_refused, *served = await asyncio.gather(
            cluster.post(COMPLETIONS, **too_long), cluster.post(COMPLETIONS, **too_much), *short
        )
        for response in (refused, also_refused):
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["code"] == "context_length_exceeded" and "800" in error["message"]
        assert {answer.text for answer in served} == {cluster.usual}
        assert (await cluster.totals(cluster.prefills)).handoffs == 6


async def test_two_requests_that_each_want_most_of_a_pool_keep_their_text(oracle: Oracle) -> None:
    """10 blocks of 16, 7 wanted by each: one is preempted and goes on where it was."""
    async with small_cluster(decode={"num_blocks": 10}) as cluster:
        texts = ("The first letter, written in haste: ", "A recipe for bread from the north: ")
        prompts = [oracle.tokenizer.encode(text * 9)[:50] for text in texts]
        sampling = SamplingParams(temperature=0.0, max_tokens=56, ignore_eos=True)
        expected = await oracle.expected(prompts, sampling)
        body = {"max_tokens": 56, "ignore_eos": True, "logprobs": 0, **GREEDY}
        answers = await asyncio.gather(
            *(cluster.ask(COMPLETIONS, prompt=p, stream=True, **body) for p in prompts)
        )
        for answer, wanted in zip(answers, expected, strict=True):
            assert_equal(answer, wanted)
        decode = await cluster.totals(cluster.decodes)
        assert decode.preemptions >= 1 and decode.tokens_recomputed > 0
        assert decode.prefill_tokens_computed == 0, "a recompute is not a prefill"
