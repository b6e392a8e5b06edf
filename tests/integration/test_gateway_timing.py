"""`timing` in answers and `GET /v1/requests`, over scripted workers."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import orjson
import pytest

from router.text import TextModel
from tests.support.byte_model import byte_model, eos_id
from tests.support.gateway import (
    CHAT,
    COMPLETIONS,
    USER_HI,
    RunningGateway,
    running_gateway,
    until,
)
from tests.support.stub_workers import scripted

BODY = {"prompt": "hi", "max_tokens": 4}
ALONE: dict[str, Any] = {"prefills": 0, "decode_prefills": "auto"}
"""Decode computes prompts itself."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return byte_model(Path(tmp_path_factory.mktemp("model")))


@pytest.fixture
async def running(model: TextModel) -> AsyncIterator[RunningGateway]:
    async with running_gateway(model, scripted("ok")) as gateway:
        yield gateway


def assert_sums(timing: dict[str, Any]) -> None:
    counted = [phase for phase in timing["phases"] if not phase["overlapped"]]
    total = sum(phase["duration_ms"] for phase in counted)
    assert total == pytest.approx(timing["total_ms"], abs=0.001 * len(counted))
    at = 0.0
    for phase in counted:
        assert phase["start_ms"] == pytest.approx(at, abs=0.001)
        at = phase["start_ms"] + phase["duration_ms"]


async def test_an_answer_has_no_timing_unless_it_is_asked_for(running: RunningGateway) -> None:
    assert "timing" not in (await running.post(COMPLETIONS, BODY)).json()
    assert "timing" not in (await running.post(COMPLETIONS, {**BODY, "timing": False})).json()
    events = await running.events(CHAT, {"messages": USER_HI, "max_tokens": 3})
    assert all("timing" not in event for event in events)


@pytest.mark.parametrize("way", ["header", "body"])
async def test_timing_comes_in_the_answer_or_in_the_last_chunk(
    running: RunningGateway, way: str
) -> None:
    headers = {"x-baton-timing": "1"} if way == "header" else {}
    body = BODY if way == "header" else {**BODY, "timing": True}
    whole = (await running.post(COMPLETIONS, body, headers=headers)).json()
    assert_sums(whole["timing"])
    events = await running.events(COMPLETIONS, body, headers=headers)
    assert events[-1] == "[DONE]"
    assert_sums(events[-2]["timing"])
    assert events[-2]["choices"] == [] and "usage" not in events[-2]
    assert all("timing" not in event for event in events[:-2])
    names = {phase["name"] for phase in whole["timing"]["phases"]}
    assert {"receive", "tokenise", "admission", "placement", "reserve", "detokenise"} <= names


async def test_timing_and_usage_share_the_last_chunk(running: RunningGateway) -> None:
    body = {**BODY, "timing": True, "stream_options": {"include_usage": True}}
    *_, last, done = await running.events(COMPLETIONS, body)
    assert done == "[DONE]" and last["usage"]["completion_tokens"] == 4
    assert_sums(last["timing"])


async def test_a_wrong_timing_switch_is_refused_by_name(running: RunningGateway) -> None:
    response = await running.post(COMPLETIONS, BODY, headers={"x-baton-timing": "maybe"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "x-baton-timing"
    response = await running.post(COMPLETIONS, {**BODY, "timing": "1"})
    assert response.json()["error"]["param"] == "timing"


async def test_a_request_is_found_by_its_id_and_by_its_answers(running: RunningGateway) -> None:
    headers = {"x-request-id": "mine-1"}
    answer = (await running.post(COMPLETIONS, BODY, headers=headers)).json()
    for name in ("mine-1", answer["id"]):
        found = (await running.client.get(f"/v1/requests/{name}")).json()
        assert found["id"] == "mine-1" and found["answer_id"] == answer["id"]
        assert found["status"] == 200 and found["output_tokens"] == 4
        assert found["prefill"] == ["prefill-0"] and found["decode"] == ["decode-0"]
        assert_sums(found["timing"])
    missing = await running.client.get("/v1/requests/nobody")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "not_found"


async def test_recent_requests_are_listed_newest_first(running: RunningGateway) -> None:
    for name in ("a", "b", "c"):
        await running.post(COMPLETIONS, BODY, headers={"x-request-id": name})
    rows = (await running.client.get("/v1/requests?limit=2")).json()["data"]
    assert [row["id"] for row in rows] == ["c", "b"]
    wrong = await running.client.get("/v1/requests?limit=0")
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "limit"


async def test_a_refused_body_has_no_ledger(running: RunningGateway) -> None:
    await running.post(COMPLETIONS, {"prompt": ""})
    assert (await running.client.get("/v1/requests")).json()["data"] == []


async def test_a_client_that_leaves_ends_its_ledger(running: RunningGateway) -> None:
    running.cluster.decodes[0].behaviour.step_s = 0.02
    body = {**BODY, "max_tokens": 200, "stream": True}
    headers = {"x-request-id": "left"}
    async with running.client.stream("POST", COMPLETIONS, json=body, headers=headers) as response:
        await anext(response.aiter_lines())
    await until(lambda: running.gateway.ledgers.recent.find("left") is not None)
    found = (await running.client.get("/v1/requests/left")).json()
    assert found["status"] == 499 and 0 < found["output_tokens"] < 200
    assert_sums(found["timing"])


async def test_every_prompt_of_a_request_is_in_its_timeline(running: RunningGateway) -> None:
    answer = await running.post(COMPLETIONS, {**BODY, "prompt": ["a", "b"], "n": 2, "timing": True})
    assert_sums(answer.json()["timing"])
    (ledger,) = running.gateway.ledgers.recent
    assert len(ledger.trails) == 2 and ledger.num_output_tokens == 16


async def usage_and_ledger(running: RunningGateway, body: dict[str, Any]) -> tuple[Any, Any]:
    answer = await running.post(COMPLETIONS, body, headers={"x-request-id": "asked"})
    assert answer.status_code == 200, answer.text
    (ledger,) = running.gateway.ledgers.recent
    return answer.json()["usage"], ledger


@pytest.mark.parametrize("end", [{}, {"stop": "STOP"}])
async def test_what_decode_found_cached_is_told_also_when_a_stop_string_ends_the_answer(
    model: TextModel, end: dict[str, Any]
) -> None:
    """Only decode's last event says it, and whoever ended the answer did not wait for that."""
    async with running_gateway(model, scripted("abc STOP more"), **ALONE) as running:
        (decode,) = running.cluster.decodes
        decode.behaviour.num_cached_tokens, decode.behaviour.step_s = 16, 0.02 * len(end)
        body = {"prompt": "x" * 20, "max_tokens": 400, **end}
        usage, ledger = await usage_and_ledger(running, body)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 16 == ledger.num_cached_tokens
        assert len(decode.counters.stopped) == len(end)
        await until(lambda: running.cluster.running == 0)


async def test_what_a_continuation_finds_cached_is_not_of_the_prompt(model: TextModel) -> None:
    """Usage once said that 48 of 20 tokens had been cached."""
    async with running_gateway(model, scripted("abcdefgh"), **ALONE) as running:
        behaviour = running.cluster.decodes[0].behaviour
        behaviour.num_cached_tokens, behaviour.fail_at, behaviour.fail_times = 48, 15, 1
        behaviour.fail = grpc.StatusCode.INTERNAL
        behaviour.fail_after_s = 0.5  # a failure may overtake the tokens before it: not here
        usage, ledger = await usage_and_ledger(running, {"prompt": "x" * 20, "max_tokens": 25})
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0 == ledger.num_cached_tokens


async def test_usage_and_ledger_mean_the_attempt_that_gave_the_first_token(
    model: TextModel,
) -> None:
    async with running_gateway(model, scripted("abcdefgh"), prefills=2) as running:
        for worker, cached in zip(running.cluster.prefills, (16, 8), strict=True):
            worker.behaviour.num_cached_tokens, worker.behaviour.fail_times = cached, 1
            worker.behaviour.start_s = 0.05
        first = running.cluster.prefills[0].behaviour
        first.fail = grpc.StatusCode.INTERNAL
        usage, ledger = await usage_and_ledger(running, {"prompt": "x" * 20, "max_tokens": 4})
        assert usage["prompt_tokens_details"]["cached_tokens"] == 8 == ledger.num_cached_tokens


async def test_a_request_that_was_refused_counts_no_prompt_and_names_no_worker(
    model: TextModel,
) -> None:
    """The share of cached tokens fell with every request that nobody took."""
    async with running_gateway(model, scripted("ok"), decodes=2, queue_timeout_s=0.2) as running:
        first, second = running.cluster.decodes
        first.behaviour.capacity = 0
        _, ledger = await usage_and_ledger(running, {"prompt": "x" * 20, "max_tokens": 4})
        assert ledger.workers("decode") == [second.worker_id]
        second.behaviour.capacity = 0
        refused = await running.post(COMPLETIONS, {"prompt": "x" * 20, "max_tokens": 4})
        assert refused.status_code == 503
        found = (await running.client.get("/v1/reports")).json()
        assert (found["requests"], found["prompt_tokens"]) == (2, 20)


async def test_time_per_token_is_that_of_the_longest_choice(model: TextModel) -> None:
    """61, 2, 2 and 2 tokens once counted as four choices of 17: a miss that was none."""
    end = eos_id(model)

    def script(prompt: Any, choice: int) -> list[int]:
        return [97] if choice else [98] * 100

    async with running_gateway(model, script, eos=end) as running:
        running.cluster.decodes[0].behaviour.step_s = 0.005
        _, ledger = await usage_and_ledger(running, {"prompt": "x", "max_tokens": 61, "n": 4})
        trail = ledger.trails[0]
        assert trail.num_tokens == 67 and trail.longest == 61
        assert ledger.tpot_s == (trail.last_token_at - trail.first_token_at) / 60


async def test_a_lost_worker_shows_as_retry_or_migration(model: TextModel) -> None:
    async with running_gateway(model, scripted("ok"), prefills=2, decodes=2) as running:
        broken = running.cluster.decodes[0].behaviour
        broken.fail, broken.fail_at = grpc.StatusCode.UNAVAILABLE, 3
        answer = await running.post(COMPLETIONS, {**BODY, "max_tokens": 8, "timing": True})
        timing = answer.json()["timing"]
        assert_sums(timing)
        (lost,) = [p for p in timing["phases"] if p["name"] == "migration" and not p["overlapped"]]
        assert lost["worker"] == "decode-0"
        found = (await running.client.get(f"/v1/requests/{answer.json()['id']}")).json()
        assert found["attempts"] == 2 and found["output_tokens"] == 8


async def test_the_ledger_log_has_a_line_per_request(model: TextModel, tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    async with running_gateway(model, scripted("ok"), ledger_log=path) as running:
        for name in ("a", "b"):
            await running.post(COMPLETIONS, BODY, headers={"x-request-id": name})
    rows = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    assert [row["id"] for row in rows] == ["a", "b"]
    for row in rows:
        assert_sums(row["timing"])


async def test_a_client_that_does_not_read_is_named_as_the_cause_of_its_miss(
    running: RunningGateway,
) -> None:
    """16 choices with their logprobs are more than what fits between the two."""
    (decode,) = running.cluster.decodes
    running.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", running.port))
        client.setblocking(False)
        began = time.monotonic()
        client.sendall(slow_request())
        await until(lambda: decode.counters.completed == 1)
        await asyncio.sleep(2 * (time.monotonic() - began) + 0.1)  # twice as long as all the rest
        loop, answer = asyncio.get_running_loop(), b""
        while piece := await loop.sock_recv(client, 1 << 16):
            answer += piece
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    await until(lambda: running.gateway.ledgers.recent.find("slow") is not None)
    (miss,) = (await running.client.get("/v1/requests/slow")).json()["misses"]
    assert (miss["target"], miss["cause"]) == ("tpot", "slow_client"), miss["shares_ms"]


def slow_request() -> bytes:
    sizes = {"n": 16, "max_tokens": 40, "logprobs": 5, "temperature": 1}
    body = orjson.dumps({"prompt": "hi", "stream": True, "ignore_eos": True, **sizes})
    return (
        f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-request-id: slow\r\n"
        f"x-baton-tpot-ms: 1\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode() + body
