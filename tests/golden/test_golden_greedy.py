"""Greedy tokens in fp32 are the offline engine's, whichever way a request is served."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from baton.engine.sampling_params import SamplingParams
from tests.golden.oracle import ExpectedChoice, Oracle, assert_equal
from tests.golden.prompts import BLOCK, GoldenPrompt
from tests.support.answers import Answer
from tests.support.cluster import Cluster, running_cluster

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

MAX_TOKENS = 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one_pair() -> AsyncIterator[Cluster]:
    async with running_cluster(prefills=1, decodes=1) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two_pairs() -> AsyncIterator[Cluster]:
    async with running_cluster(prefills=2, decodes=2) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(oracle: Oracle, prompts: list[GoldenPrompt]) -> list[list[ExpectedChoice]]:
    assert len(prompts) >= 40
    return await oracle.expected([oracle.ids(prompt) for prompt in prompts], GREEDY)


async def ask_all(
    cluster: Cluster, prompts: list[GoldenPrompt], batch: int, stream: bool
) -> list[Answer]:
    """Every prompt, `batch` at a time."""
    answers: list[Answer] = []
    for start in range(0, len(prompts), batch):
        answers += await asyncio.gather(
            *(
                cluster.ask(p.path, **p.body, stream=stream, temperature=0, max_tokens=MAX_TOKENS)
                for p in prompts[start : start + batch]
            )
        )
    return answers


def forget_prefixes(cluster: Cluster) -> None:
    for worker in cluster.workers:
        worker.parts.engine.apply(worker.blocks.flush)


async def assert_golden(
    cluster: Cluster,
    prompts: list[GoldenPrompt],
    expected: list[list[ExpectedChoice]],
    batch: int,
    stream: bool,
) -> None:
    """Cold, then warm; no worker did another one's work."""
    await cluster.wait_for_workers()
    forget_prefixes(cluster)
    before = await cluster.totals(cluster.prefills)
    for warm in (False, True):
        answers = await ask_all(cluster, prompts, batch, stream)
        for prompt, answer, wanted in zip(prompts, answers, expected, strict=True):
            assert_equal(answer, wanted, f"{prompt.name}, warm={warm}")
            longest_hit = (answer.counts[0] - 1) // BLOCK * BLOCK
            if warm and len(cluster.prefills) == 1:
                assert answer.num_cached == longest_hit
    after = await cluster.totals(cluster.prefills)
    decode = await cluster.totals(cluster.decodes)
    assert after.handoffs - before.handoffs == 2 * sum(c.num_tokens > 1 for (c,) in expected)
    assert after.handoffs == decode.handoffs
    assert decode.prefill_tokens_computed == 0, "decode prefilled by itself"
    await cluster.settle()


@pytest.mark.slow
async def test_the_oracle_gives_the_same_tokens_alone_as_in_a_batch(
    oracle: Oracle, prompts: list[GoldenPrompt], expected: list[list[ExpectedChoice]]
) -> None:
    for prompt, wanted in list(zip(prompts, expected, strict=True))[::9]:
        (alone,) = await asyncio.to_thread(oracle.llm.generate, [oracle.ids(prompt)], GREEDY)
        seen = [oracle.as_seen(choice) for choice in alone]
        assert [c.tokens for c in seen] == [c.tokens for c in wanted], prompt.name


async def test_the_router_renders_and_tokenises_as_transformers_does(
    one_pair: Cluster, oracle: Oracle, prompts: list[GoldenPrompt]
) -> None:
    model, _ = one_pair.gateway.ready_model()
    for prompt in prompts:
        content = prompt.content
        if prompt.is_chat:
            assert await model.encode_chat(content) == oracle.ids(prompt), prompt.name  # type: ignore[arg-type]
        elif isinstance(content, str):
            assert await model.encode_prompt(content) == oracle.ids(prompt), prompt.name


STREAMED = pytest.param(True, id="streamed", marks=pytest.mark.slow)


@pytest.mark.parametrize("stream", [pytest.param(False, id="whole"), STREAMED])
async def test_alone_on_one_pair_a_sample_of_prompts_gives_the_offline_tokens(
    one_pair: Cluster,
    prompts: list[GoldenPrompt],
    expected: list[list[ExpectedChoice]],
    stream: bool,
) -> None:
    some = slice(int(stream), None, 9)
    await assert_golden(one_pair, prompts[some], expected[some], 1, stream)


@pytest.mark.slow
async def test_eight_at_a_time_on_one_pair_a_quarter_of_the_prompts_give_the_offline_tokens_whole(
    one_pair: Cluster, prompts: list[GoldenPrompt], expected: list[list[ExpectedChoice]]
) -> None:
    await assert_golden(one_pair, prompts[::4], expected[::4], 8, stream=False)


async def test_eight_at_a_time_on_two_pairs_give_the_offline_tokens_streamed(
    two_pairs: Cluster, prompts: list[GoldenPrompt], expected: list[list[ExpectedChoice]]
) -> None:
    await assert_golden(two_pairs, prompts, expected, 8, stream=True)
    for worker in two_pairs.workers:
        assert (await two_pairs.info(worker)).counters.handoffs > 0, "a worker was never used"


TRANSPORTS = {"shm": "shm", "torch": "torch:gloo", "grpc": "grpc"}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    "step",
    [
        pytest.param(9, id="some"),
        pytest.param(1, id="all", marks=[pytest.mark.slow, pytest.mark.timeout(400)]),
    ],
)
async def test_every_transport_gives_the_offline_tokens(
    prompts: list[GoldenPrompt],
    expected: list[list[ExpectedChoice]],
    transport: str,
    step: int,
) -> None:
    async with running_cluster(prefills=1, decodes=1, transport=transport) as cluster:
        await assert_golden(cluster, prompts[::step], expected[::step], 8, stream=True)
        (link,) = (await cluster.info(cluster.prefills[0])).links
        assert link.transport == TRANSPORTS[transport] and not link.degraded


async def test_decode_prefilling_in_its_own_batches_gives_the_offline_tokens(
    prompts: list[GoldenPrompt], expected: list[list[ExpectedChoice]]
) -> None:
    """Conditional disaggregation: the same tokens without a hand-off."""
    async with running_cluster(prefills=0, router={"decode_prefills": "auto"}) as cluster:
        answers = await ask_all(cluster, prompts[::6], 4, stream=False)
        for prompt, answer, wanted in zip(prompts[::6], answers, expected[::6], strict=True):
            assert_equal(answer, wanted, prompt.name)
        decode = await cluster.totals(cluster.decodes)
        computed = sum(answer.counts[0] - answer.num_cached for answer in answers)
        assert decode.prefill_tokens_computed == computed and decode.handoffs == 0
        await cluster.settle()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("pairs", [1, 2])
async def test_every_prompt_gives_the_offline_tokens_in_every_way_of_serving(
    one_pair: Cluster,
    two_pairs: Cluster,
    prompts: list[GoldenPrompt],
    expected: list[list[ExpectedChoice]],
    pairs: int,
    batch: int,
    stream: bool,
) -> None:
    await assert_golden((one_pair, two_pairs)[pairs - 1], prompts, expected, batch, stream)
