"""Whatever was asked for continues rightly when the decode worker dies in mid-answer."""

import asyncio
from typing import Any

import pytest

from tests.chaos.test_faults import NO_HANG_S
from tests.support.answers import Answer
from tests.support.chaos_cluster import ChaosCluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="session"),
]

BODY: dict[str, Any] = {
    "prompt": "One day a fox met a crow. " * 8,
    "max_tokens": 30,
    "temperature": 0.9,
    "top_k": 20,
    "ignore_eos": True,
    "logprobs": 3,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "a seed": {"seed": 11},
    "three choices": {"seed": 5, "n": 3},
    "penalties": {
        "seed": 7,
        "presence_penalty": 1.5,
        "frequency_penalty": 1.1,
        "repetition_penalty": 1.3,
    },
    "penalties and choices": {"seed": 2, "n": 2, "frequency_penalty": 1.9},
    "biased": {"seed": 8, "logit_bias": {"101": 6, "32": 5}},
    "a minimum of tokens": {"seed": 9, "min_tokens": 25, "ignore_eos": False},
}
DIES_AT = 9
"""The step of decode that is never shown."""


async def through_a_death(cluster: ChaosCluster, **body: Any) -> Answer:
    async def die() -> None:
        cluster.busy("decode").kill()

    died = cluster.faults.arm("decode.step", die, DIES_AT)
    async with asyncio.timeout(NO_HANG_S):
        answer = await cluster.ask(**body)
    assert died.is_set(), "it ended before the death"
    return answer


def assert_equal(answer: Answer, expected: Answer) -> None:
    assert answer.texts == expected.texts and answer.reasons == expected.reasons
    assert answer.counts == expected.counts
    for mine, wanted in zip(answer.choices, expected.choices, strict=True):
        assert mine.tokens == wanted.tokens, "a token is missing or came twice"
        assert mine.logprobs == pytest.approx(wanted.logprobs, abs=1e-3)


@pytest.mark.parametrize("processes", ["shm"], indirect=True)
@pytest.mark.parametrize("option", OPTIONS)
async def test_an_option_holds_across_the_death_of_its_decode_worker(
    cluster: ChaosCluster, option: str
) -> None:
    body = BODY | OPTIONS[option]
    expected = await cluster.ask(**body)
    assert_equal(await through_a_death(cluster, **body), expected)
    assert expected.counts[1] == 30 * body.get("n", 1) or option == "a minimum of tokens"
    await cluster.wait_at_rest()


@pytest.mark.parametrize("processes", ["shm"], indirect=True)
async def test_a_stop_string_begun_before_the_death_ends_the_answer_after_it(
    cluster: ChaosCluster,
) -> None:
    letters = {str(letter): 60 for letter in range(97, 123)}
    body = BODY | {"seed": 11, "logit_bias": letters}
    whole = await cluster.ask(**body)
    # A letter per token, so the lost step makes the letter at DIES_AT or the one after it.
    stop = whole.text[DIES_AT - 2 : DIES_AT + 4]
    body |= {"stop": [stop]}
    expected = await cluster.ask(**body)
    assert expected.text == whole.text[: whole.text.index(stop)]
    assert expected.reasons == ["stop"] and len(stop) == 6
    assert_equal(await through_a_death(cluster, **body), expected)
    await cluster.wait_at_rest()
