"""Streams: the wire format, stop strings, split characters, several choices, usage.

A streamed answer and a whole one have the same text, reasons and counts.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from baton.v1 import common_pb2, decode_pb2
from router import dialer
from router.generation import Delta, Generation
from router.job import Job
from router.openai.outputs import Gathered
from router.text import StopPatterns, TextModel
from tests.support.byte_model import byte_model, eos_id
from tests.support.gateway import (
    CHAT,
    COMPLETIONS,
    USER_HI,
    RunningGateway,
    joined,
    running_gateway,
    until,
)
from tests.support.stub_workers import StubDecode, scripted

TEXT = "Once upon a time, in a small house by the sea, there lived a fox. "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return byte_model(Path(tmp_path_factory.mktemp("model")))


@pytest.fixture
async def gateway(model: TextModel) -> AsyncIterator[RunningGateway]:
    async with running_gateway(model, scripted(TEXT)) as running:
        yield running


async def both_ways(
    gateway: RunningGateway, path: str, body: dict[str, Any]
) -> list[tuple[str, str]]:
    """(text, finish reason) per choice, checked to be equal streamed and whole; same usage."""
    whole = (await gateway.post(path, body)).json()
    events = await gateway.events(path, {**body, "stream_options": {"include_usage": True}})
    assert events[-1] == "[DONE]"
    assert events[-2]["usage"] == whole["usage"]
    answers = []
    for choice in whole["choices"]:
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert joined(events, choice["index"]) == (text, [choice["finish_reason"]])
        answers.append((text, choice["finish_reason"]))
    return answers


@pytest.mark.parametrize(
    "stop",
    [
        TEXT[5:12],
        [TEXT[5:12]],
        ["nowhere", TEXT[20:25], TEXT[5:12], "never"],
        [TEXT[5:12], TEXT[8:15]],
        [TEXT[8:15], TEXT[5:12]],
    ],
)
async def test_text_ends_just_before_the_stop_streamed_or_not(
    gateway: RunningGateway, stop: Any
) -> None:
    """vllm-project/vllm#3574"""
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": USER_HI})):
        body = {**body, "stop": stop, "max_tokens": 60}
        assert await both_ways(gateway, path, body) == [(TEXT[:5], "stop")]
    await until(lambda: gateway.cluster.running == 0)


async def test_a_stop_in_the_first_token_is_found(gateway: RunningGateway) -> None:
    body = {"prompt": "x", "stop": TEXT[0], "max_tokens": 60}
    assert await both_ways(gateway, COMPLETIONS, body) == [("", "stop")]
    await until(lambda: gateway.cluster.running == 0)
    usage = (await gateway.post(COMPLETIONS, body)).json()["usage"]
    assert usage["completion_tokens"] == 1


async def test_a_stop_that_is_only_in_the_prompt_does_not_stop(gateway: RunningGateway) -> None:
    body = {"prompt": "prompt END", "stop": "END", "max_tokens": 30}
    assert await both_ways(gateway, COMPLETIONS, body) == [(TEXT[:30], "length")]


async def test_a_stop_begun_but_not_finished_at_the_end_is_shown(gateway: RunningGateway) -> None:
    body = {"prompt": "x", "stop": TEXT[8:15], "max_tokens": 12}
    assert await both_ways(gateway, COMPLETIONS, body) == [(TEXT[:12], "length")]


async def test_a_match_cancels_decode_at_once(gateway: RunningGateway) -> None:
    gateway.cluster.decodes[0].behaviour.step_s = 0.05
    body = {"prompt": "x", "stop": TEXT[5:12], "max_tokens": 400}
    usage = (await gateway.post(COMPLETIONS, body)).json()["usage"]
    assert usage["completion_tokens"] == 12
    await until(lambda: gateway.cluster.decodes[0].counters.cancelled == 1)
    assert gateway.cluster.decodes[0].counters.tokens_sent < 60


async def test_one_choice_that_stops_is_ended_on_decode_while_others_go_on(
    gateway: RunningGateway,
) -> None:
    texts = [b"aaSTOPaaaaaaaaaaaaaaaaaa", b"bbbbbbbbbbbbbbbbbbbbbbbb"]
    gateway.cluster.script = lambda prompt, choice: list(texts[choice])
    gateway.cluster.decodes[0].behaviour.step_s = 0.01
    body = {"prompt": "x", "stop": "STOP", "max_tokens": 20, "n": 2}
    assert await both_ways(gateway, COMPLETIONS, body) == [("aa", "stop"), ("b" * 20, "length")]
    stopped = gateway.cluster.decodes[0].counters.stopped
    assert [choice for _, choice in stopped] == [0, 0]
    usage = (await gateway.post(COMPLETIONS, body)).json()["usage"]
    assert usage["completion_tokens"] == 6 + 20


async def test_telling_decode_of_stops_holds_up_nobody(
    model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each was waited for before the next token of the others was read."""
    asked = []

    async def slow(self: StubDecode, request: decode_pb2.StopChoiceRequest, _: Any) -> None:
        asked.append(request.choice)
        await asyncio.Event().wait()

    monkeypatch.setattr(StubDecode, "StopChoice", slow)
    monkeypatch.setattr(dialer, "STOP_TIMEOUT_S", 60.0)
    texts = [b"a" * n + b"STOP" + b"a" * 40 for n in (1, 2, 3)] + [b"b" * 40]
    async with running_gateway(model, lambda prompt, choice: list(texts[choice])) as gateway:
        gateway.cluster.decodes[0].behaviour.step_s = 0.01
        body = {"prompt": "x", "stop": "STOP", "max_tokens": 40, "n": 4}
        async with asyncio.timeout(30):
            events = await gateway.events(COMPLETIONS, body)
        assert joined(events, 3) == ("b" * 40, ["length"])
        assert joined(events, 1) == ("aa", ["stop"]) and sorted(asked) == [0, 1, 2]


async def test_min_tokens_lets_early_stops_pass(gateway: RunningGateway) -> None:
    gateway.cluster.script = scripted("aXbXcX")
    body = {"prompt": "x", "stop": "X", "max_tokens": 10, "min_tokens": 3}
    assert await both_ways(gateway, COMPLETIONS, body) == [("aXb", "stop")]


async def test_split_characters_are_whole_in_every_chunk(gateway: RunningGateway) -> None:
    """ggml-org/llama.cpp#28926"""
    gateway.cluster.script = scripted("😀世界é👩‍👧")
    body = {"messages": USER_HI, "n": 2, "max_tokens": 12}
    assert await both_ways(gateway, CHAT, body) == [("😀世界é", "length")] * 2
    events = await gateway.events(CHAT, body)
    for event in events[:-1]:
        for choice in event["choices"]:
            assert "\ufffd" not in (choice["delta"].get("content") or "")
    assert joined(events, 1) == ("😀世界é", ["length"])


async def test_a_character_cut_by_max_tokens_is_the_same_in_both_modes(
    gateway: RunningGateway,
) -> None:
    gateway.cluster.script = scripted("a😀")
    body = {"messages": USER_HI, "max_tokens": 3}
    assert await both_ways(gateway, CHAT, body) == [("a\ufffd", "length")]


async def test_an_emoji_can_be_a_stop(gateway: RunningGateway) -> None:
    gateway.cluster.script = scripted("ok 😁😀 no")
    body = {"messages": USER_HI, "stop": "😀", "max_tokens": 20}
    assert await both_ways(gateway, CHAT, body) == [("ok 😁", "stop")]


def check_choice(events: list[Any], index: int, chat: bool, max_tokens: int) -> None:
    mine = [c for e in events[:-1] for c in e["choices"] if c["index"] == index]
    assert mine, f"no chunk of choice {index}"
    if chat:
        assert mine[0]["delta"]["role"] == "assistant"
        assert sum("role" in c["delta"] for c in mine) == 1
        shown = [
            (c["delta"].get("content") or "", [t["token"] for t in c["logprobs"]["content"]])
            for c in mine
            if c["logprobs"]
        ]
    else:
        shown = [(c["text"], c["logprobs"]["tokens"]) for c in mine if c["logprobs"]]
    assert all(text == "".join(tokens) for text, tokens in shown)
    assert sum(len(tokens) for _, tokens in shown) == max_tokens
    assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]
    assert mine[-1]["finish_reason"] == "length"


async def test_every_choice_streams_under_its_own_index(gateway: RunningGateway) -> None:
    """BerriAI/litellm#3276"""
    gateway.cluster.script = lambda prompt, choice: [97 + choice + 5 * len(prompt) % 10]
    body = {"messages": USER_HI, "n": 3, "logprobs": True, "temperature": 1, "max_tokens": 12}
    events = await gateway.events(CHAT, body)
    for index in range(3):
        check_choice(events, index, True, 12)
    assert len({joined(events, i)[0] for i in range(3)}) == 3

    gateway.cluster.script = lambda prompt, choice: [prompt[0] + choice]
    body = {"prompt": ["A", "C"], "n": 2, "logprobs": 1, "max_tokens": 4}
    events = await gateway.events(COMPLETIONS, body)
    for index in range(4):
        check_choice(events, index, False, 4)
    assert [joined(events, i)[0] for i in range(4)] == ["AAAA", "BBBB", "CCCC", "DDDD"]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("chat", [True, False])
async def test_usage_is_one_extra_chunk_before_done(
    gateway: RunningGateway, n: int, chat: bool
) -> None:
    """vllm-project/vllm#7262"""
    path, body = (CHAT, {"messages": USER_HI}) if chat else (COMPLETIONS, {"prompt": "x"})
    body = {**body, "n": n, "max_tokens": 4}
    events = await gateway.events(path, {**body, "stream_options": {"include_usage": True}})
    *chunks, usage, done = events
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 4 * n
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    without = await gateway.events(path, body)
    assert all("usage" not in chunk and chunk["choices"] for chunk in without[:-1])


async def test_chunks_arrive_while_tokens_are_made(gateway: RunningGateway) -> None:
    """vllm-project/production-stack#777"""
    gateway.cluster.decodes[0].behaviour.step_s = 0.02
    body = {"messages": USER_HI, "max_tokens": 50, "stream": True}
    arrivals = []
    async with gateway.client.stream("POST", CHAT, json=body) as response:
        async for line in response.aiter_lines():
            if line:
                arrivals.append(time.monotonic())
    made_in_s = 50 * 0.02
    assert arrivals[-1] - arrivals[0] > 0.8 * made_in_s


async def test_the_first_token_does_not_wait_for_the_hand_off(gateway: RunningGateway) -> None:
    prefill = gateway.cluster.prefills[0]
    prefill.behaviour.hang, prefill.behaviour.fail_at = True, 1
    body = {"messages": USER_HI, "max_tokens": 5, "stream": True}
    async with gateway.client.stream("POST", CHAT, json=body) as response:
        lines = response.aiter_lines()
        async with asyncio.timeout(5):
            seen = [line async for line in _take(lines, 3)]
    assert '"content":"O"' in seen[2]


class SlowToRead(Gathered):
    """A client whose first chunk is long on its way."""

    def __init__(self, generation: Generation, pause_s: float) -> None:
        super().__init__(generation)
        self._pause_s = pause_s

    def render(self, deltas: Sequence[Delta]) -> bytes:
        super().render(deltas)
        return b"chunk"

    async def send(self, rendered: bytes) -> None:
        pause_s, self._pause_s = self._pause_s, 0.0
        await asyncio.sleep(pause_s)


async def test_a_client_that_is_slow_to_read_does_not_make_its_prefill_worker_suspect(
    model: TextModel,
) -> None:
    """The time that the client took counted as the worker's silence."""
    silence_s = 1.0
    async with running_gateway(model, scripted(TEXT), prefill_timeout_s=silence_s) as gateway:
        _, conductor = gateway.gateway.ready_model()
        deadline = asyncio.get_running_loop().time() + 30
        sampling = common_pb2.SamplingParams(max_tokens=8, n=1)
        job = Job("slow", [1, 2, 3], sampling, "", deadline, deadline)
        generation = Generation(1, model.tokenizer, StopPatterns(()), 0)
        await conductor.run(job, SlowToRead(generation, 1.2 * silence_s))
        assert generation.num_tokens == 8
        assert gateway.cluster.directory.suspects == []
        assert gateway.cluster.prefills[0].counters.calls == 1


async def _take(lines: AsyncIterator[str], count: int) -> AsyncIterator[str]:
    async for line in lines:
        yield line
        count -= 1
        if not count:
            return


async def test_counts_agree_streamed_and_whole(gateway: RunningGateway, model: TextModel) -> None:
    """vllm-project/vllm#8625"""
    gateway.cluster.eos = eos_id(model)
    gateway.cluster.script = lambda prompt, choice: list(TEXT[: 5 + choice].encode())
    for extra in (
        {},
        {"n": 3},
        {"stop": TEXT[2:4]},
        {"stop": TEXT[2:4], "n": 3},
        {"max_tokens": 1},
    ):
        body = {"messages": USER_HI, "seed": 5, "max_tokens": 20, **extra}
        await both_ways(gateway, CHAT, body)
    usage = (await gateway.post(CHAT, {"messages": USER_HI, "n": 3})).json()["usage"]
    # Each choice ends with an end-of-sequence token, which counts.
    assert usage["completion_tokens"] == 6 + 7 + 8


async def test_one_token_needs_no_decode_worker(gateway: RunningGateway) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    assert await both_ways(gateway, COMPLETIONS, body) == [("O", "length")]
    assert gateway.cluster.decodes[0].counters.calls == 0


async def test_cached_tokens_are_prefills_true_hits(gateway: RunningGateway) -> None:
    """vllm-project/vllm#46898"""
    for hits in (0, 16, 8):
        gateway.cluster.prefills[0].behaviour.num_cached_tokens = hits
        body = {"prompt": [1] * 20, "max_tokens": 3}
        await both_ways(gateway, COMPLETIONS, body)
        usage = (await gateway.post(COMPLETIONS, body)).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == hits


async def test_logprobs_are_finite_and_equal_in_both_modes(gateway: RunningGateway) -> None:
    body = {"messages": USER_HI, "logprobs": True, "top_logprobs": 5, "max_tokens": 10}
    whole = (await gateway.post(CHAT, body)).json()["choices"][0]["logprobs"]["content"]
    events = await gateway.events(CHAT, body)
    streamed = [
        entry
        for event in events[:-1]
        for choice in event["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert streamed == whole
    assert all(len(entry["top_logprobs"]) == 5 and entry["logprob"] <= 0 for entry in whole)


async def test_the_openai_client_reads_both_modes(gateway: RunningGateway) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key="none", max_retries=0
    ) as client:
        messages: Any = USER_HI
        whole = await client.chat.completions.create(
            model="bytes", messages=messages, max_tokens=10, logprobs=True, top_logprobs=2
        )
        assert whole.choices[0].message.content == TEXT[:10]
        assert whole.usage is not None and whole.usage.completion_tokens == 10
        stream = await client.chat.completions.create(
            model="bytes", messages=messages, max_tokens=10, stream=True
        )
        pieces = [c.choices[0].delta.content or "" async for c in stream if c.choices]
        assert "".join(pieces) == TEXT[:10]
        text = await client.completions.create(model="bytes", prompt="x", max_tokens=5, logprobs=2)
        assert text.choices[0].text == TEXT[:5]
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="bytes", messages=[], max_tokens=1)
        assert caught.value.param == "messages"
        assert [m.id async for m in client.models.list()] == ["bytes"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_usage_so_far_is_in_every_chunk_when_asked(
    gateway: RunningGateway, path: str
) -> None:
    """As load generators ask that count tokens and not chunks."""
    asked = {"messages": USER_HI} if path == CHAT else {"prompt": "hi"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**asked, "max_tokens": 6, "ignore_eos": True, "stream_options": options}
    *chunks, last, _ = await gateway.events(path, body)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and set(counts) == {1, 2, 3, 4, 5, 6}
    assert last["usage"]["completion_tokens"] == 6
    prompts = {chunk["usage"]["prompt_tokens"] for chunk in (*chunks, last)}
    assert len(prompts) == 1
