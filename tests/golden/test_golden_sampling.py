"""Seeded sampling in fp32: the same draws whichever way a request is served."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from baton.engine.sampling_params import SamplingParams
from tests.golden.oracle import Oracle, assert_equal
from tests.golden.prompts import GoldenPrompt
from tests.support.answers import Answer
from tests.support.cluster import Cluster, running_cluster

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

SAMPLINGS: dict[str, dict[str, Any]] = {
    "temperature and top-p": {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    "three choices": {"temperature": 0.8, "top_p": 0.95, "seed": 7, "n": 3},
    "penalties": {
        "temperature": 0.8,
        "seed": 123,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
    },
    "everything": {
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.02,
        "seed": 2**63 + 5,
        "n": 3,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.1,
        "min_tokens": 8,
    },
    "greedy with penalties": {"temperature": 0.0, "seed": 3, "frequency_penalty": 1.5},
}
QUICK = ("everything", "greedy with penalties")
CASES = [
    pytest.param(values, id=name, marks=[] if name in QUICK else [pytest.mark.slow])
    for name, values in SAMPLINGS.items()
]
NAMES = ("fact", "emoji", "chat long turns", "65 ids")


PAIRS = [pytest.param(1, id="1P1D"), pytest.param(2, id="2P2D", marks=pytest.mark.slow)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=PAIRS)
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    async with running_cluster(prefills=request.param, decodes=request.param) as cluster:
        yield cluster


@pytest.mark.parametrize("sampling", CASES)
async def test_seeded_draws_are_the_offline_ones_cold_and_warm_streamed_and_whole(
    cluster: Cluster, oracle: Oracle, prompts: list[GoldenPrompt], sampling: dict[str, Any]
) -> None:
    some = [prompt for prompt in prompts if prompt.name in NAMES]
    assert len(some) == len(NAMES)
    wanted = await oracle.expected(
        [oracle.ids(prompt) for prompt in some], SamplingParams(max_tokens=10, **sampling)
    )
    await cluster.wait_for_workers()
    for stream in (False, True):
        answers: list[Answer] = await asyncio.gather(
            *(cluster.ask(p.path, **p.body, **sampling, max_tokens=10, stream=stream) for p in some)
        )
        for prompt, answer, expected in zip(some, answers, wanted, strict=True):
            assert_equal(answer, expected, prompt.name)
    await cluster.settle()


async def test_a_request_without_a_seed_differs_from_time_to_time(cluster: Cluster) -> None:
    body = {"prompt": "Once upon a time", "temperature": 1.5, "max_tokens": 12}
    await cluster.wait_for_workers()
    answers = [await cluster.ask("/v1/completions", **body) for _ in range(3)]
    assert len({answer.text for answer in answers}) == 3
