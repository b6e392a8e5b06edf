"""What clients may send and what they get, over real workers of the real model in fp32.

Each test also leaves the cluster as it found it: an ordinary request gives its usual text and
every block is back.
"""

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from baton.engine.sampling_params import SamplingParams
from tests.golden.oracle import Oracle
from tests.support.answers import Answer, events_of
from tests.support.cluster import CHAT, COMPLETIONS, Cluster, running_cluster

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

BLOCK = 16
USER = [{"role": "user", "content": "Tell me about the sea in two sentences."}]
STORY = "Once upon a time, there was a little robot who"


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


async def both_ways(cluster: Cluster, path: str, **body: Any) -> Answer:
    """The answer, which must not depend on how it is sent."""
    whole = await cluster.ask(path, **body)
    streamed = await cluster.ask(path, **body, stream=True)
    assert_same(streamed, whole)
    return whole


def assert_same(one: Answer, other: Answer) -> None:
    """Log probabilities may differ in rounding: the second prompt is warm."""
    assert one.texts == other.texts and one.reasons == other.reasons
    assert one.tokens == other.tokens and one.counts == other.counts
    for a, b in zip(one.choices, other.choices, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-3)
        assert [len(top) for top in a.top] == [len(top) for top in b.top]


async def assert_refused(cluster: Cluster, path: str, param: str, **body: Any) -> None:
    """400 that names the field, before a worker sees anything."""
    before = await cluster.totals(cluster.workers)
    for stream in (False, True):
        response = await cluster.post(path, **body, stream=stream)
        assert response.status_code == 400, response.text
        assert response.headers["content-type"] == "application/json"
        error = response.json()["error"]
        assert error["param"] == param and param in error["message"]
    assert await cluster.totals(cluster.workers) == before


# --- request validation ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "bias",
    [{"50152": -100, "3": 5}, {"-1": 1}, {"abc": 1}, {"3": 1e9}, {"49152": 1}],
    ids=["far outside", "negative", "no number", "huge bias", "first outside"],
)
async def test_a_logit_bias_outside_the_vocabulary_is_refused(
    cluster: Cluster, bias: dict[str, float]
) -> None:
    await assert_refused(cluster, COMPLETIONS, "logit_bias", prompt="Hi", logit_bias=bias)
    await assert_refused(cluster, CHAT, "logit_bias", messages=USER, logit_bias=bias)


@pytest.mark.parametrize("prompt", [[999_999], [[1, 2, 3], [999_999]], [49_152], [-1]], ids=str)
async def test_token_ids_outside_the_vocabulary_refuse_the_whole_request(
    cluster: Cluster, prompt: list[Any]
) -> None:
    await assert_refused(cluster, COMPLETIONS, "prompt", prompt=prompt, max_tokens=4)


async def test_two_prompts_of_token_ids_give_two_choices_in_order(cluster: Cluster) -> None:
    prompts = [[1, 2, 3], [4, 5]]
    body = {"max_tokens": 6, "temperature": 0}
    both = await both_ways(cluster, COMPLETIONS, prompt=prompts, **body)
    alone = [await cluster.ask(COMPLETIONS, prompt=prompt, **body) for prompt in prompts]
    assert both.texts == [answer.text for answer in alone]
    assert both.usage["prompt_tokens"] == 5


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["Hi", ""]], ids=str)
async def test_an_empty_prompt_is_refused(cluster: Cluster, prompt: Any) -> None:
    await assert_refused(cluster, COMPLETIONS, "prompt", prompt=prompt)


async def test_an_empty_chat_message_is_served_since_the_template_is_not_empty(
    cluster: Cluster,
) -> None:
    messages = [{"role": "user", "content": ""}]
    answer = await both_ways(cluster, CHAT, messages=messages, max_tokens=4, temperature=0)
    assert answer.counts[0] > 0 and answer.reasons[0] in ("stop", "length")


# --- streams --------------------------------------------------------------------------------


async def test_no_part_of_a_stop_string_is_ever_shown(cluster: Cluster) -> None:
    body = {"prompt": STORY, "max_tokens": 16, "temperature": 0}
    text = (await cluster.ask(COMPLETIONS, **body)).text
    first = text.index(" ", 1)
    cases: list[list[str]] = [
        [text[5:12]],
        [text[20:32]],
        ["never said", text[30:36], text[8:15], "###"],
        [text[8:14], text[10:20]],
        [text[1 : first - 1]],
        ["little robot who"],
        [text[-3:]],
    ]
    for stops in cases:
        answer = await both_ways(cluster, COMPLETIONS, **body, stop=stops)
        found = [text.index(stop) for stop in stops if stop in text]
        cut = min(found, default=len(text))
        assert answer.text == text[:cut], stops
        assert answer.reasons == ["stop" if found else "length"], stops


async def test_characters_of_several_tokens_come_whole_in_both_modes(cluster: Cluster) -> None:
    """Only the tokens of four characters may be drawn; each is several of them."""
    pattern = "🦀🐍日本" * 6
    tokenizer = cluster.gateway.ready_model()[0].tokenizer
    ids = set(tokenizer.encode("🦀🐍日本", False))
    assert len(ids) > 4 and any(b"\xf0" in tokenizer.table[i] for i in ids)
    body = {
        "prompt": pattern,
        "logit_bias": dict.fromkeys(map(str, ids), 100),
        "temperature": 0,
        "n": 2,
    }
    full = await both_ways(cluster, COMPLETIONS, **body, max_tokens=24)
    assert full.texts[0] == full.texts[1]
    assert any(character in full.text for character in "🦀🐍日本")
    assert "\ufffd" not in full.text[:-1]
    for max_tokens in (1, 2, 3):
        cut = await both_ways(cluster, COMPLETIONS, **body, max_tokens=max_tokens)
        shown = cut.text.removesuffix("\ufffd")
        assert "\ufffd" not in shown and full.text.startswith(shown)
    stop = next(c for c in "🐍🦀日本" if c in full.text[1:])
    stopped = await both_ways(cluster, COMPLETIONS, **body, max_tokens=24, stop=stop)
    assert stopped.text == full.text[: full.text.index(stop)] and stopped.reasons[0] == "stop"


async def test_every_line_of_a_stream_is_utf8_json(cluster: Cluster) -> None:
    messages = [{"role": "user", "content": "Repeat exactly: 🦀🐍日本🦀🐍日本"}]
    body = {"messages": messages, "stream": True, "max_tokens": 16, "temperature": 0}
    async with cluster.client.stream("POST", CHAT, json=body) as response:
        raw = b"".join([piece async for piece in response.aiter_raw()])
    lines = raw.decode("utf-8", "strict").split("\n\n")
    assert all(line.startswith("data: ") for line in lines if line)
    assert lines[-2:] == ["data: [DONE]", ""]


async def test_three_streamed_choices_keep_their_own_index(cluster: Cluster) -> None:
    body = {"messages": USER, "n": 3, "temperature": 1, "seed": 5, "max_tokens": 12}
    answer = await both_ways(cluster, CHAT, **body, logprobs=True)
    assert len(answer.choices) == 3 and len(set(answer.texts)) == 3
    for choice in answer.choices:
        assert b"".join(choice.tokens).decode(errors="replace") == choice.text


async def test_two_prompts_with_two_choices_give_four_indices(cluster: Cluster) -> None:
    body = {"n": 2, "temperature": 1, "seed": 5, "max_tokens": 8, "logprobs": 1}
    both = await both_ways(cluster, COMPLETIONS, prompt=[STORY, "The moon is"], **body)
    first = await cluster.ask(COMPLETIONS, prompt=STORY, **body)
    second = await cluster.ask(COMPLETIONS, prompt="The moon is", **body)
    assert both.texts == first.texts + second.texts


async def test_a_stream_carries_its_tokens_as_they_come(cluster: Cluster) -> None:
    """As many chunks with text as tokens: nothing gathers them on the way."""
    body = {"prompt": STORY, "max_tokens": 20, "temperature": 0, "stream": True}
    async with cluster.client.stream("POST", COMPLETIONS, json=body) as response:
        events = [event async for event in events_of(response)]
    texts = [e["choices"][0]["text"] for e in events if e != "[DONE]" and e["choices"]]
    assert len([text for text in texts if text]) == 20


# --- sampling and log probabilities ---------------------------------------------------------


async def test_tiny_temperatures_are_greedy_with_finite_logprobs(cluster: Cluster) -> None:
    body = {"prompt": STORY, "seed": 1, "max_tokens": 10, "logprobs": 1}
    greedy = await cluster.ask(COMPLETIONS, **body, temperature=0)
    answers = await asyncio.gather(
        *(cluster.ask(COMPLETIONS, **body, temperature=t) for t in (1e-7, 1e-6, 1e-5, 1e-4, 1e-3))
    )
    for answer in answers:
        assert answer.text == greedy.text
        assert all(math.isfinite(x) and x <= 0 for x in answer.choices[0].logprobs)


async def test_logprobs_are_the_true_log_softmax_in_both_modes(
    cluster: Cluster, oracle: Oracle
) -> None:
    body = {"messages": USER, "temperature": 0, "max_tokens": 10}
    answer = await both_ways(cluster, CHAT, **body, logprobs=True, top_logprobs=5)
    text = oracle.tokenizer.apply_chat_template(USER, tokenize=False, add_generation_prompt=True)
    ids = oracle.tokenizer.encode(text, add_special_tokens=False)
    sampling = SamplingParams(temperature=0.0, max_tokens=10, logprobs=5)
    ((offline,),) = await asyncio.to_thread(oracle.choices, [ids], sampling)
    (choice,) = answer.choices
    assert len(choice.top) == 10
    for i, top in enumerate(choice.top):
        values = [value for _, value in top]
        assert len({token for token, _ in top}) == 5
        assert values == sorted(values, reverse=True)
        assert (choice.tokens[i], choice.logprobs[i]) in top
        assert sum(map(math.exp, values)) <= 1 + 1e-6
        true = [value for _, value in offline.tokens[i].top]
        assert values == pytest.approx(true, abs=1e-3)


async def test_sampling_settings_do_not_change_the_reported_distribution(cluster: Cluster) -> None:
    body = {"prompt": STORY, "max_tokens": 1, "logprobs": 5, "seed": 3}
    plain = await cluster.ask(COMPLETIONS, **body, temperature=0)
    (top,) = plain.choices[0].top
    for changed in ({"temperature": 2.0}, {"temperature": 0.1, "top_p": 0.1}):
        answer = await cluster.ask(COMPLETIONS, **body, **changed)
        values = sorted((value for _, value in answer.choices[0].top[0]), reverse=True)
        assert values[:5] == pytest.approx([value for _, value in top][:5], abs=1e-3)


async def test_a_seed_gives_the_same_text_alone_among_others_and_warm(cluster: Cluster) -> None:
    body = {"prompt": STORY, "seed": 123, "temperature": 0.8, "max_tokens": 32}
    alone = await cluster.ask(COMPLETIONS, **body)
    warm = await cluster.ask(COMPLETIONS, **body)
    others = [
        cluster.ask(COMPLETIONS, prompt=f"{i} is a number and", max_tokens=8) for i in range(8)
    ]
    among, *_ = await asyncio.gather(cluster.ask(COMPLETIONS, **body), *others)
    assert alone.text == warm.text == among.text
    assert warm.num_cached == 0 or warm.num_cached % BLOCK == 0


async def test_three_choices_of_one_seed_differ_and_repeat(cluster: Cluster) -> None:
    body = {"prompt": STORY, "seed": 123, "temperature": 0.8, "max_tokens": 16, "n": 3}
    first, again = [await cluster.ask(COMPLETIONS, **body) for _ in range(2)]
    assert len(set(first.texts)) == 3 and first.texts == again.texts


# --- usage ----------------------------------------------------------------------------------


async def test_cached_tokens_are_the_true_hit(cluster: Cluster) -> None:
    prompt = [(7919 * i) % 40_000 + 100 for i in range(64)]
    half = prompt[:32] + [(104_729 * i) % 40_000 + 100 for i in range(32)]
    body = {"max_tokens": 4, "temperature": 0}
    cold = await cluster.ask(COMPLETIONS, prompt=prompt, **body)
    warm = await both_ways(cluster, COMPLETIONS, prompt=prompt, **body)
    shared = await cluster.ask(COMPLETIONS, prompt=half, **body, stream=True)
    assert [a.num_cached for a in (cold, warm, shared)] == [0, 48, 32]
    assert warm.texts == cold.texts


@pytest.mark.parametrize(
    "extra", [{}, {"stop": " the"}, {"n": 3, "stop": " the"}, {"max_tokens": 1}], ids=str
)
async def test_usage_is_the_same_streamed_and_whole(
    cluster: Cluster, oracle: Oracle, extra: dict[str, Any]
) -> None:
    body = {"prompt": STORY, "seed": 9, "temperature": 0.7, "max_tokens": 16, "logprobs": 0}
    answer = await both_ways(cluster, COMPLETIONS, **body | extra)
    prompt, completion, total = answer.counts
    assert prompt == len(oracle.tokenizer.encode(STORY)) and total == prompt + completion
    if "stop" not in extra:
        assert completion == extra.get("max_tokens", 16) * extra.get("n", 1)
        return
    # Each choice up to the token that completes the stop, found in what it says without one.
    free = await cluster.ask(COMPLETIONS, **body | extra | {"stop": None})
    assert completion == sum(_tokens_until(choice.tokens, b" the") for choice in free.choices)


def _tokens_until(tokens: list[bytes], stop: bytes) -> int:
    text = b""
    for count, token in enumerate(tokens, 1):
        text += token
        if stop in text:
            return count
    return len(tokens)
