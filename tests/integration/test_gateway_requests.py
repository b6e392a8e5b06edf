"""What the gateway accepts and refuses, over real HTTP and gRPC with scripted workers.

Every refusal is OpenAI-shaped, names the field and reaches no worker; an ordinary request
right after it is answered as usual.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.text import TextModel
from tests.support.byte_model import MAX_MODEL_LEN, VOCAB_SIZE, byte_model
from tests.support.gateway import (
    CHAT,
    COMPLETIONS,
    USER_HI,
    RunningGateway,
    joined,
    running_gateway,
)
from tests.support.stub_workers import scripted


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return byte_model(Path(tmp_path_factory.mktemp("model")))


@pytest.fixture
async def gateway(model: TextModel) -> AsyncIterator[RunningGateway]:
    async with running_gateway(model, scripted("abcdefghij")) as running:
        yield running


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "request_id"}
    assert error["request_id"] == response.headers["x-request-id"]
    assert "Traceback" not in response.text
    return error


async def assert_refused(
    gateway: RunningGateway, path: str, body: Any, param: str | None, status: int = 400
) -> dict[str, Any]:
    """Refused alike streamed and not, without a call to any worker."""
    before = gateway.cluster.calls
    responses = [await gateway.post(path, body)]
    if isinstance(body, dict) and "stream" not in body:
        responses.append(await gateway.post(path, {**body, "stream": True}))
    for response in responses:
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/json"
        error = error_of(response)
        assert error["param"] == param, error
    assert gateway.cluster.calls == before
    return error


async def assert_still_serves(gateway: RunningGateway) -> None:
    response = await gateway.post(COMPLETIONS, {"prompt": "x", "max_tokens": 4})
    assert response.json()["choices"][0]["text"] == "abcd"


@pytest.mark.parametrize(
    "bias",
    [
        {str(VOCAB_SIZE + 1000): -100, "3": 5},
        {"-1": 1},
        {"abc": 1},
        {"3": 1e9},
        {"3": "x"},
        [3],
        {"0" * 22 + "65": 1},
        {"066": 1},
    ],
)
async def test_a_bad_logit_bias_is_refused_by_name(
    gateway: RunningGateway, bias: dict[str, float]
) -> None:
    """vllm-project/vllm#16529"""
    body = {"prompt": "x", "temperature": 0, "max_tokens": 8, "logit_bias": bias}
    await assert_refused(gateway, COMPLETIONS, body, "logit_bias")
    await assert_still_serves(gateway)


@pytest.mark.parametrize("prompt", [[999999], [[1, 2, 3], [999999]], [-1], [VOCAB_SIZE]])
async def test_a_prompt_with_ids_outside_the_vocabulary_is_refused_whole(
    gateway: RunningGateway, prompt: list[Any]
) -> None:
    """vllm-project/vllm#9634"""
    await assert_refused(gateway, COMPLETIONS, {"prompt": prompt}, "prompt")
    await assert_still_serves(gateway)


async def test_lists_of_token_ids_give_a_choice_each(gateway: RunningGateway) -> None:
    response = await gateway.post(COMPLETIONS, {"prompt": [[1, 2, 3], [4, 5]], "max_tokens": 2})
    assert [c["index"] for c in response.json()["choices"]] == [0, 1]
    assert response.json()["usage"]["prompt_tokens"] == 5


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], None, ["a", ""], {"a": 1}, 3])
async def test_an_empty_or_shapeless_prompt_is_refused(
    gateway: RunningGateway, prompt: Any
) -> None:
    """vllm-project/vllm#7746"""
    await assert_refused(gateway, COMPLETIONS, {"prompt": prompt}, "prompt")
    await assert_still_serves(gateway)


async def test_a_chat_that_renders_to_nothing_is_refused(tmp_path: Path) -> None:
    model = byte_model(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}")
    async with running_gateway(model, scripted("ab")) as gateway:
        body = {"messages": [{"role": "user", "content": ""}]}
        await assert_refused(gateway, CHAT, body, "messages")


@pytest.mark.parametrize("body", [{"messages": []}, {}, {"messages": None}])
async def test_empty_messages_are_refused_in_so_many_words(
    gateway: RunningGateway, body: dict[str, Any]
) -> None:
    """ai-dynamo/dynamo#2064"""
    error = await assert_refused(gateway, CHAT, body, "messages")
    assert "messages must not be empty" in error["message"]


TOOL_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


@pytest.mark.parametrize(
    "turn",
    [
        [{"role": "assistant", "content": ""}],
        [
            {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]},
            {"role": "tool", "tool_call_id": "1", "content": "7"},
        ],
        [
            {"role": "assistant", "tool_calls": [TOOL_CALL]},
            {"role": "tool", "tool_call_id": "1", "content": "7"},
        ],
    ],
)
async def test_histories_with_empty_assistant_turns_are_answered(
    gateway: RunningGateway, turn: list[dict[str, Any]]
) -> None:
    """vllm-project/vllm#21089"""
    messages = [{"role": "user", "content": "A"}, *turn, {"role": "user", "content": "B"}]
    response = await gateway.post(CHAT, {"messages": messages, "max_tokens": 3})
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == "abc"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [("[" * 100_000, "nested too deeply"), ('{"a":"\\ud800"}', "half of a surrogate pair")],
)
async def test_tool_arguments_that_no_template_can_show_are_refused_by_name(
    tmp_path: Path, arguments: str, told: str
) -> None:
    """Both were internal errors: the parser of the body does not look into a string."""
    source = "{% for m in messages %}{{ m.role }}{{ m.tool_calls | tojson if m.tool_calls }}"
    model = byte_model(tmp_path, source + "{% endfor %}")
    async with running_gateway(model, scripted("ab")) as gateway:
        call = {"function": {"name": "f", "arguments": arguments}}
        messages = [*USER_HI, {"role": "assistant", "tool_calls": [call]}]
        error = await assert_refused(gateway, CHAT, {"messages": messages}, "messages")
        assert "messages[1].tool_calls[0].function.arguments" in error["message"]
        assert told in error["message"]


@pytest.mark.parametrize("arguments", ["not JSON", '{"a": "\\u00e9 \\ud83d\\ude00"}', "[" * 100])
async def test_other_tool_arguments_are_shown(tmp_path: Path, arguments: str) -> None:
    source = "{% for m in messages %}{{ m.role }}{{ m.tool_calls | tojson if m.tool_calls }}"
    model = byte_model(tmp_path, source + "{% endfor %}")
    async with running_gateway(model, scripted("ab")) as gateway:
        call = {"function": {"name": "f", "arguments": arguments}}
        messages = [*USER_HI, {"role": "assistant", "tool_calls": [call]}]
        assert (await gateway.post(CHAT, {"messages": messages})).status_code == 200


async def test_a_template_that_takes_no_tool_messages_says_so(tmp_path: Path) -> None:
    source = "{% for m in messages %}{% if m.role == 'tool' %}"
    source += "{{ raise_exception('tool messages are not supported') }}{% endif %}x{% endfor %}"
    async with running_gateway(byte_model(tmp_path, source), scripted("ab")) as gateway:
        messages = [*USER_HI, {"role": "tool", "content": "7"}]
        error = await assert_refused(gateway, CHAT, {"messages": messages}, "messages")
        assert "tool messages are not supported" in error["message"]


async def test_text_parts_are_one_prompt(gateway: RunningGateway) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    bodies = [{"messages": [{"role": "user", "content": c}]} for c in (parts, "a\nb")]
    counts = [(await gateway.post(CHAT, b)).json()["usage"]["prompt_tokens"] for b in bodies]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_over_long_prompt_is_a_plain_400_streamed_or_not(
    gateway: RunningGateway, stream: bool
) -> None:
    """llm-d/llm-d-inference-sim#596"""
    text = "x" * (MAX_MODEL_LEN + 4)
    for path, body, param in (
        (COMPLETIONS, {"prompt": text}, "prompt"),
        (COMPLETIONS, {"prompt": [1] * (MAX_MODEL_LEN + 4)}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": MAX_MODEL_LEN}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": text}]}, "messages"),
    ):
        error = await assert_refused(gateway, path, {**body, "stream": stream}, param)
        assert error["code"] == "context_length_exceeded"


async def test_the_limit_is_what_live_workers_can_hold(gateway: RunningGateway) -> None:
    cluster = gateway.cluster
    cluster.directory.put(cluster.prefills[0].record, max_model_len=32)
    cluster.directory.put(cluster.decodes[0].record, max_model_len=64)
    for length, max_tokens, status in ((32, 32, 200), (33, 1, 400), (32, 33, 400)):
        body = {"prompt": [1] * length, "max_tokens": max_tokens}
        assert (await gateway.post(COMPLETIONS, body)).status_code == status


async def test_chat_without_max_tokens_may_fill_the_context(gateway: RunningGateway) -> None:
    usage = (await gateway.post(CHAT, {"messages": USER_HI})).json()["usage"]
    assert usage["total_tokens"] == MAX_MODEL_LEN


async def test_completions_default_to_16_tokens_or_what_fits(gateway: RunningGateway) -> None:
    for length, expected in ((3, 16), (MAX_MODEL_LEN - 5, 5)):
        response = await gateway.post(COMPLETIONS, {"prompt": [1] * length})
        assert response.json()["usage"]["completion_tokens"] == expected


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [
        ("top_p", 1.0, 200),
        ("top_p", 1, 200),
        ("top_p", 0.0, 200),
        ("top_p", 1.01, 400),
        ("top_p", -0.1, 400),
        ("temperature", 2.0, 200),
        ("temperature", 2.01, 400),
        ("temperature", -1, 400),
        ("top_k", -1, 200),
        ("top_k", -2, 400),
        ("min_p", 1.5, 400),
        ("presence_penalty", 2.1, 400),
        ("frequency_penalty", -2, 200),
        ("repetition_penalty", 0, 400),
        ("repetition_penalty", 1e-46, 400),
        ("n", 16, 200),
        ("n", 17, 400),
        ("stop", ["a"] * 17, 400),
        ("stop", [""], 400),
        ("stop_token_ids", [VOCAB_SIZE], 400),
        ("min_tokens", 17, 400),
        ("cache_salt", "", 400),
        ("cache_salt", 5, 400),
        ("seed", -1, 200),
        ("seed", 1.5, 400),
        ("seed", 2**64, 400),
    ],
)
async def test_ranges_end_where_they_are_documented_to_end(
    gateway: RunningGateway, field: str, value: Any, status: int
) -> None:
    """huggingface/text-generation-inference#2222 and its neighbours"""
    body = {"prompt": "x", field: value}
    if status == 400:
        await assert_refused(gateway, COMPLETIONS, body, field)
    else:
        assert (await gateway.post(COMPLETIONS, body)).status_code == 200


@pytest.mark.parametrize(("body", "field"), [({"n": 5}, "n"), ({"best_of": 5}, "best_of")])
async def test_more_choices_than_any_worker_can_run_are_refused_and_hold_up_nobody(
    gateway: RunningGateway, body: dict[str, Any], field: str
) -> None:
    """Decode refused it for ever, at the head of the queue: nobody was served for as long."""
    for worker in gateway.cluster.decodes:
        gateway.cluster.directory.put(worker.record, max_num_seqs=4)
    await assert_refused(gateway, COMPLETIONS, {"prompt": "x", **body}, field)
    assert (await gateway.post(COMPLETIONS, {"prompt": "x", "n": 4})).status_code == 200
    await assert_still_serves(gateway)


async def test_beams_show_no_logprobs_not_even_none_of_them(gateway: RunningGateway) -> None:
    body = {"prompt": "x", "n": 2, "use_beam_search": True, "logprobs": 0}
    error = (await gateway.post(COMPLETIONS, body)).json()["error"]
    assert (error["param"], error["code"]) == ("logprobs", "unsupported_parameter")


async def test_top_p_one_is_the_same_as_leaving_it_out(gateway: RunningGateway) -> None:
    for extra in ({}, {"top_p": 1.0}, {"top_p": 1}, {"top_p": None}):
        await gateway.post(COMPLETIONS, {"prompt": "x", "seed": 7, **extra})
    requests = gateway.cluster.prefills[0].counters.requests
    assert all(request.sampling == requests[0].sampling for request in requests)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": "hi"}, "messages"),
        ({"messages": USER_HI, "stop": {"a": 1}}, "stop"),
        ({"messages": USER_HI, "max_tokens": "ten"}, "max_tokens"),
        ({"messages": USER_HI, "max_tokens": 0}, "max_tokens"),
        ({"messages": USER_HI, "max_tokens": -1}, "max_tokens"),
        ({"messages": USER_HI, "max_tokens": 1.5}, "max_tokens"),
        ({"messages": USER_HI, "temperature": "hot"}, "temperature"),
        ({"messages": USER_HI, "temperature": True}, "temperature"),
        ({"messages": USER_HI, "n": 0}, "n"),
        ({"messages": USER_HI, "n": -1}, "n"),
        ({"messages": USER_HI, "stream": "true"}, "stream"),
        ({"messages": USER_HI, "logprobs": 3}, "logprobs"),
        ({"messages": USER_HI, "top_logprobs": 3}, "top_logprobs"),
        ({"messages": USER_HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": USER_HI, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": ["hi"]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": USER_HI, "tools": [{"type": "function"}]}, "tools"),
        ({"messages": USER_HI, "audio": {"voice": "x"}}, "audio"),
        ({"messages": USER_HI, "modalities": ["audio"]}, "modalities"),
        ({"messages": USER_HI, "best_of": 2}, "best_of"),
        ({"messages": USER_HI, "temprature": 0}, "temprature"),
        ({"messages": USER_HI, "model": 5}, "model"),
        ([1, 2], None),
        ("hi", None),
    ],
)
async def test_wrong_types_and_unsupported_fields_are_refused_by_name(
    gateway: RunningGateway, body: Any, param: str | None
) -> None:
    """ggml-org/llama.cpp#7089"""
    if isinstance(body, dict) and param in ("stream", "stream_options"):
        response = await gateway.post(CHAT, body)
        assert (response.status_code, error_of(response)["param"]) == (400, param)
        return
    await assert_refused(gateway, CHAT, body, param)


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": NaN}', b"\xff\xfe", b"[" * 5000])
async def test_a_body_that_is_not_json_is_refused(gateway: RunningGateway, content: bytes) -> None:
    for path in (CHAT, COMPLETIONS):
        response = await gateway.client.post(path, content=content)
        assert response.status_code == 400
        error_of(response)
    await assert_still_serves(gateway)


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "bogus"}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"multipleOf": 3}}},
        {"type": "json_object"},
        "json",
    ],
)
async def test_a_response_format_is_refused_rather_than_ignored(
    gateway: RunningGateway, response_format: Any
) -> None:
    """ai-dynamo/dynamo#11377"""
    body = {"messages": USER_HI, "response_format": response_format}
    await assert_refused(gateway, CHAT, body, "response_format")


async def test_fields_that_ask_for_nothing_are_accepted(gateway: RunningGateway) -> None:
    harmless = {
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "audio": None,
    }
    response = await gateway.post(CHAT, {"messages": USER_HI, "max_tokens": 2, **harmless})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"echo": True, "max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ({"echo": True, "max_tokens": -1}, "max_tokens"),
        ({"echo": True, "logprobs": 1}, "logprobs"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
    ],
)
async def test_scoring_a_prompt_is_a_clear_refusal(
    gateway: RunningGateway, extra: dict[str, Any], param: str
) -> None:
    """vllm-project/vllm#6521"""
    await assert_refused(gateway, COMPLETIONS, {"prompt": "one two three", **extra}, param)
    await assert_still_serves(gateway)


async def test_echo_puts_the_prompt_before_the_text(gateway: RunningGateway) -> None:
    for prompts in (["hé", "hi"], [[104, 0xC3, 0xA9], [104, 105]]):
        body = {"prompt": prompts, "echo": True, "max_tokens": 3, "n": 2}
        choices = (await gateway.post(COMPLETIONS, body)).json()["choices"]
        assert [c["text"] for c in choices] == ["héabc", "héabc", "hiabc", "hiabc"]
        events = await gateway.events(COMPLETIONS, body)
        assert [joined(events, i)[0] for i in range(4)] == [c["text"] for c in choices]


async def test_best_of_returns_the_most_likely_choices(gateway: RunningGateway) -> None:
    gateway.cluster.script = lambda prompt, choice: list(b"xyz"[choice : choice + 1])
    body = {"prompt": "x", "n": 2, "best_of": 3, "max_tokens": 4}
    answer = (await gateway.post(COMPLETIONS, body)).json()
    # The stub gives choice i a log probability of -0.125 * (i + 1) per token.
    assert [c["text"] for c in answer["choices"]] == ["xxxx", "yyyy"]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 12
    response = await gateway.post(COMPLETIONS, {**body, "stream": True})
    assert error_of(response)["param"] == "best_of"


@pytest.mark.parametrize("size", [1 << 10, 32 << 10])
async def test_a_huge_request_id_does_not_grow_the_answer(
    gateway: RunningGateway, size: int
) -> None:
    """vllm-project/vllm#10968"""
    body = {"messages": USER_HI, "max_tokens": 5, "stream": True}
    plain = await gateway.post(CHAT, body)
    response = await gateway.post(CHAT, body, headers={"x-request-id": "r" * size})
    assert response.status_code == 200
    assert response.headers["x-request-id"].startswith("req-")
    assert len(response.content) == len(plain.content)
    assert max(len(line) for line in response.text.splitlines()) < 500


@pytest.mark.parametrize(("size", "kept"), [(128, True), (129, False)])
async def test_a_request_id_is_taken_whole_or_not_at_all(
    gateway: RunningGateway, size: int, kept: bool
) -> None:
    """Longer ones were cut, so that two of them could be the same."""
    sent = "r" * size
    response = await gateway.post(CHAT, {}, headers={"x-request-id": sent})
    assert (response.headers["x-request-id"] == sent) is kept
    assert kept or response.headers["x-request-id"].startswith("req-")


async def test_strange_headers_are_survived(gateway: RunningGateway) -> None:
    headers: list[tuple[bytes, bytes]] = [(f"x-{i}".encode(), b"v") for i in range(200)]
    headers += [(b"x-request-id", "schön".encode())]
    response = await gateway.client.post(
        COMPLETIONS, json={"prompt": "x", "max_tokens": 4}, headers=headers
    )
    assert response.status_code == 200
    assert response.headers["x-request-id"].isascii()


async def test_a_sane_request_id_comes_back_in_header_and_error(gateway: RunningGateway) -> None:
    response = await gateway.post(CHAT, {}, headers={"x-request-id": "my-id.1"})
    assert response.headers["x-request-id"] == "my-id.1"
    assert error_of(response)["request_id"] == "my-id.1"


async def test_an_oversized_body_is_refused(gateway: RunningGateway) -> None:
    big = b'{"prompt": "' + b"x" * (17 << 20) + b'"}'
    response = await gateway.client.post(COMPLETIONS, content=big)
    assert response.status_code == 413
    error_of(response)

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(big), 1 << 20):
            yield big[start : start + (1 << 20)]

    response = await gateway.client.post(COMPLETIONS, content=chunks())
    assert response.status_code == 413


async def test_an_unknown_model_is_404_and_known_names_are_listed(gateway: RunningGateway) -> None:
    await assert_refused(gateway, CHAT, {"model": "gpt-9", "messages": USER_HI}, "model", 404)
    listed = (await gateway.client.get("/v1/models")).json()["data"]
    assert [entry["id"] for entry in listed] == ["bytes"]
    assert (await gateway.client.get("/v1/models/bytes")).json()["id"] == "bytes"
    assert (await gateway.client.get("/v1/models/gpt-9")).status_code == 404
    long = await gateway.post(CHAT, {"model": "g" * 100_000, "messages": USER_HI})
    assert long.status_code == 404 and len(long.content) < 1000


async def test_wrong_paths_and_methods_are_openai_shaped(gateway: RunningGateway) -> None:
    for response, status in (
        (await gateway.client.get("/v2/nothing"), 404),
        (await gateway.client.get(CHAT), 405),
        (await gateway.client.delete("/v1/models"), 405),
    ):
        assert response.status_code == status
        error_of(response)


async def test_a_seed_is_always_sent_and_differs_when_the_client_gives_none(
    gateway: RunningGateway,
) -> None:
    for _ in range(3):
        await gateway.post(COMPLETIONS, {"prompt": "x"})
    seeds = {r.sampling.seed for r in gateway.cluster.prefills[0].counters.requests}
    assert len(seeds) == 3


async def test_every_sampling_parameter_reaches_both_workers(gateway: RunningGateway) -> None:
    body = {
        "prompt": "x",
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "n": 2,
        "seed": 11,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop_token_ids": [5],
        "ignore_eos": True,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"3": 5},
        "logprobs": 4,
        "cache_salt": "tenant",
    }
    assert (await gateway.post(COMPLETIONS, body)).status_code == 200
    for worker in gateway.cluster.workers:
        (request,) = worker.counters.requests
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.5, 0.25, 0.125)
        assert (sampling.top_k, sampling.n, sampling.seed) == (7, 2, 11)
        assert (sampling.max_tokens, sampling.min_tokens, sampling.logprobs) == (9, 2, 4)
        assert (list(sampling.stop_token_ids), sampling.ignore_eos) == ([5], True)
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
        assert (sampling.repetition_penalty, dict(sampling.logit_bias)) == (1.5, {3: 5.0})
        assert request.cache_salt == "tenant"
