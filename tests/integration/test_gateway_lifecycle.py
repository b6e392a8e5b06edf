"""Clients that leave, workers that fail, too much load, nobody there: each ends well."""

import asyncio
import dataclasses
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import orjson
import pytest

from baton.cluster.registry import RegistryState
from router.text import TextModel
from tests.support.byte_model import byte_model
from tests.support.gateway import (
    CHAT,
    COMPLETIONS,
    USER_HI,
    RunningGateway,
    joined,
    running_gateway,
    sse_events,
    until,
)
from tests.support.stub_workers import scripted

TEXT = "All work and no play makes a dull day. "
LONG = {"prompt": "x", "max_tokens": 400}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return byte_model(Path(tmp_path_factory.mktemp("model")))


@pytest.fixture
async def gateway(model: TextModel) -> AsyncIterator[RunningGateway]:
    async with running_gateway(model, scripted(TEXT)) as running:
        yield running


@asynccontextmanager
async def raw_request(
    gateway: RunningGateway, body: dict[str, Any], path: str = COMPLETIONS
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A request on a bare socket, so that a test decides how the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    content = orjson.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    await writer.drain()
    try:
        yield reader, writer
    finally:
        writer.close()


async def assert_ordinary(gateway: RunningGateway) -> None:
    response = await gateway.post(COMPLETIONS, {"prompt": "x", "max_tokens": 5})
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["text"] == TEXT[:5]


def idle(gateway: RunningGateway) -> bool:
    admission = gateway.gateway.admission
    return gateway.cluster.running == 0 and admission.running == 0 and admission.waiting == 0


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_work_stops_when_the_client_leaves(
    gateway: RunningGateway, stream: bool, half: bool, stage: str
) -> None:
    """BerriAI/litellm#37140"""
    prefill, decode = gateway.cluster.prefills[0], gateway.cluster.decodes[0]
    decode.behaviour.step_s = 0.05
    if stage == "prefill":
        prefill.behaviour.start_s = 30
    async with raw_request(gateway, {**LONG, "stream": stream}) as (_, writer):
        if stage == "prefill":
            await until(lambda: prefill.counters.running == 1)
        else:
            await until(lambda: decode.counters.tokens_sent >= 3 and not prefill.counters.running)
        if half:
            writer.write_eof()
        else:
            writer.close()
        await until(lambda: idle(gateway))
    assert decode.counters.cancelled == 1
    if stage == "prefill":  # later it is left once it has said all, which counts as either
        assert prefill.counters.cancelled == 1
    assert decode.counters.tokens_sent < 100
    prefill.behaviour.start_s = 0
    await assert_ordinary(gateway)


async def test_work_of_every_prompt_stops_when_the_client_leaves(gateway: RunningGateway) -> None:
    gateway.cluster.decodes[0].behaviour.step_s = 0.05
    counters = gateway.cluster.decodes[0].counters
    body = {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 400}
    async with raw_request(gateway, body) as (_, writer):
        await until(lambda: counters.calls == 3 and counters.tokens_sent >= 6)
        writer.close()
        await until(lambda: idle(gateway))
    assert counters.cancelled == 3


async def test_a_client_that_leaves_the_queue_reaches_no_worker(model: TextModel) -> None:
    async with running_gateway(model, scripted(TEXT), max_running=1) as gateway:
        gateway.cluster.decodes[0].behaviour.step_s = 0.05
        async with raw_request(gateway, LONG) as (_, running):
            await until(lambda: gateway.cluster.decodes[0].counters.calls == 1)
            async with raw_request(gateway, LONG) as (_, queued):
                await until(lambda: gateway.gateway.admission.waiting == 1)
                queued.close()
                await until(lambda: gateway.gateway.admission.waiting == 0)
            running.close()
            await until(lambda: idle(gateway))
        assert gateway.cluster.decodes[0].counters.calls == 1
        await assert_ordinary(gateway)


async def test_a_client_that_leaves_while_workers_are_full_frees_its_place(
    gateway: RunningGateway,
) -> None:
    gateway.cluster.decodes[0].behaviour.capacity = 0
    async with raw_request(gateway, LONG) as (_, writer):
        await until(lambda: gateway.gateway.admission.waiting == 1)
        writer.close()
        await until(lambda: idle(gateway))


async def read_until_broken(gateway: RunningGateway, kill_after: int) -> list[Any]:
    """A stream of 100 tokens whose decode worker dies after some chunks."""
    events: list[Any] = []
    body = {"prompt": "x", "max_tokens": 100, "stream": True}
    async with gateway.client.stream("POST", COMPLETIONS, json=body) as response:
        assert response.status_code == 200
        async for event in sse_events(response):
            events.append(event)
            if len(events) == kill_after:
                await gateway.cluster.decodes[0].kill()
    return events


async def test_a_stream_cut_by_a_dead_worker_ends_in_an_error_event(
    gateway: RunningGateway,
) -> None:
    """BerriAI/litellm#40260"""
    gateway.cluster.decodes[0].behaviour.step_s = 0.01
    events = await read_until_broken(gateway, kill_after=5)
    assert events[-1]["error"]["code"] == "worker_failed"
    assert events[-1]["error"]["request_id"]
    text, reasons = joined([e for e in events if "choices" in e])
    assert TEXT.startswith(text[: len(TEXT)]) and reasons == []
    assert gateway.cluster.directory.suspects == ["decode-0"]
    await until(lambda: idle(gateway))


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_dead_worker_is_replaced_before_anything_is_sent(
    model: TextModel, role: str, stream: bool
) -> None:
    async with running_gateway(model, scripted(TEXT), prefills=2, decodes=2) as gateway:
        cluster = gateway.cluster
        victim = cluster.prefills[0] if role == "prefill" else cluster.decodes[0]
        await victim.kill()
        body = {"prompt": "x", "max_tokens": 8}
        if stream:
            assert joined(await gateway.events(COMPLETIONS, body)) == (TEXT[:8], ["length"])
        else:
            await assert_ordinary(gateway)
        assert cluster.directory.suspects == [victim.worker_id]
        await until(lambda: idle(gateway))


async def test_a_whole_answer_is_tried_again_even_after_its_first_tokens(
    model: TextModel,
) -> None:
    async with running_gateway(model, scripted(TEXT), decodes=2) as gateway:
        first = gateway.cluster.decodes[0].behaviour
        first.fail, first.fail_at = grpc.StatusCode.INTERNAL, 3
        await assert_ordinary(gateway)
        await until(lambda: gateway.cluster.decodes[1].counters.completed == 1)


async def test_attempts_are_bounded_and_faults_keep_their_words_to_themselves(
    gateway: RunningGateway,
) -> None:
    behaviour = gateway.cluster.prefills[0].behaviour
    behaviour.fail, behaviour.detail = grpc.StatusCode.INTERNAL, "Traceback (most recent call last)"
    response = await gateway.post(CHAT, {"messages": USER_HI})
    assert response.status_code == 503
    assert "Traceback" not in response.text
    assert response.json()["error"]["request_id"] == response.headers["x-request-id"]
    assert gateway.cluster.prefills[0].counters.calls == 3
    await until(lambda: idle(gateway))
    behaviour.fail = None
    await assert_ordinary(gateway)


async def test_a_request_that_a_worker_rejects_is_the_clients_error(
    gateway: RunningGateway,
) -> None:
    behaviour = gateway.cluster.prefills[0].behaviour
    behaviour.fail, behaviour.detail = grpc.StatusCode.INVALID_ARGUMENT, "the prompt can never fit"
    for stream in (False, True):
        response = await gateway.post(COMPLETIONS, {**LONG, "stream": stream})
        assert response.status_code == 400
        assert "can never fit" in response.json()["error"]["message"]
    assert gateway.cluster.prefills[0].counters.calls == 2


async def test_a_silent_decode_worker_is_passed_over_in_time(model: TextModel) -> None:
    async with running_gateway(model, scripted(TEXT), decodes=2, reserve_timeout_s=1.0) as gateway:
        gateway.cluster.decodes[0].behaviour.hang = True
        await assert_ordinary(gateway)
        assert gateway.cluster.directory.suspects == ["decode-0"]


async def test_a_request_has_a_longest_life(model: TextModel) -> None:
    async with running_gateway(model, scripted(TEXT), request_timeout_s=1.0) as gateway:
        decode = gateway.cluster.decodes[0].behaviour
        decode.hang, decode.fail_at = True, 3
        response = await gateway.post(COMPLETIONS, LONG)
        assert response.status_code == 504
        events = await gateway.events(COMPLETIONS, LONG)
        assert events[-1]["error"]["code"] == "timeout"
        await until(lambda: idle(gateway))


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_missing_role_is_a_503_that_names_it_and_heals(
    gateway: RunningGateway, role: str
) -> None:
    """llm-d/llm-d-router#402"""
    cluster = gateway.cluster
    worker = cluster.decodes[0] if role == "decode" else cluster.prefills[0]
    cluster.directory.remove(worker.worker_id)
    for stream in (False, True):
        response = await gateway.post(COMPLETIONS, {**LONG, "stream": stream})
        assert response.status_code == 503
        assert role in response.json()["error"]["message"]
        assert int(response.headers["retry-after"]) >= 1
    ready = await gateway.client.get("/health/ready")
    assert (ready.status_code, ready.json()["missing"]) == (503, [role])
    assert (await gateway.client.get("/health/live")).status_code == 200
    cluster.directory.put(worker.record)
    assert (await gateway.client.get("/health/ready")).status_code == 200
    await assert_ordinary(gateway)


async def test_workers_of_another_model_are_never_asked(gateway: RunningGateway) -> None:
    cluster = gateway.cluster
    for worker in cluster.workers:
        layout = dataclasses.replace(worker.record.layout, fingerprint="fingerprint-b")
        cluster.directory.put(worker.record, layout=layout)
    assert (await gateway.post(COMPLETIONS, LONG)).status_code == 503
    ready = (await gateway.client.get("/health/ready")).json()
    assert ready["missing"] == ["prefill", "decode"]
    assert cluster.calls == 0


async def test_without_prefill_decode_may_do_all_when_allowed(model: TextModel) -> None:
    async with running_gateway(
        model, scripted(TEXT), prefills=0, decode_prefills="fallback"
    ) as gateway:
        gateway.cluster.decodes[0].behaviour.num_cached_tokens = 7
        assert (await gateway.client.get("/health/ready")).status_code == 200
        response = await gateway.post(COMPLETIONS, {"prompt": "x" * 20, "max_tokens": 5})
        assert response.json()["choices"][0]["text"] == TEXT[:5]
        assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 7


async def test_while_the_model_loads_readiness_and_requests_say_so(model: TextModel) -> None:
    release = threading.Event()

    def load() -> TextModel:
        release.wait(10)
        return model

    async with running_gateway(load, scripted(TEXT)) as gateway:
        ready = await gateway.client.get("/health/ready")
        assert ready.status_code == 503
        assert "loading" in ready.json()["reason"]
        assert (await gateway.client.get("/health/live")).status_code == 200
        assert (await gateway.post(CHAT, {"messages": USER_HI})).status_code == 503
        assert (await gateway.client.get("/v1/models")).status_code == 503
        release.set()
        await until(lambda: gateway.gateway.model is not None)
        await assert_ordinary(gateway)


async def test_a_lost_registry_is_degraded_not_down(gateway: RunningGateway) -> None:
    gateway.cluster.directory.state = RegistryState.DISCONNECTED
    response = await gateway.client.get("/health")
    assert (response.status_code, response.json()["status"]) == (200, "degraded")
    await assert_ordinary(gateway)


async def test_without_prefill_workers_it_is_degraded_while_decode_prefills(
    model: TextModel,
) -> None:
    async with running_gateway(
        model, scripted(TEXT), prefills=0, decode_prefills="auto"
    ) as gateway:
        response = await gateway.client.get("/health/ready")
        assert response.status_code == 200
        assert (response.json()["status"], response.json()["missing"]) == ("degraded", ["prefill"])
        await assert_ordinary(gateway)


async def test_on_a_shared_port_it_takes_no_connection_before_it_can_serve_one(
    model: TextModel,
) -> None:
    """The socket listened while the model was being handed over: some got 503 `loading`."""

    def load() -> TextModel:
        time.sleep(0.05)
        return model

    async with running_gateway(load, scripted(TEXT), reuse_port=True) as gateway:
        assert gateway.gateway.ready_model()[0] is model
        await assert_ordinary(gateway)


@pytest.mark.parametrize("crowd", [200, pytest.param(500, marks=pytest.mark.slow)])
async def test_overload_is_refused_fast_and_the_rest_is_served(
    model: TextModel, crowd: int
) -> None:
    """vllm-project/vllm#18826"""
    patience = {"reserve_timeout_s": 100.0, "peer_timeout_s": 100.0, "queue_timeout_s": 100.0}
    async with running_gateway(model, scripted(TEXT), max_queue=40, **patience) as gateway:
        decode = gateway.cluster.decodes[0]
        decode.behaviour.capacity, decode.behaviour.step_s = 8, 0.005
        started = time.monotonic()

        async def send() -> tuple[httpx.Response, float]:
            body = {"prompt": "x", "max_tokens": 8}
            response = await gateway.post(COMPLETIONS, body, timeout=100)
            return response, time.monotonic() - started

        answers = await asyncio.gather(*(send() for _ in range(crowd)))
        served = [r for r, _ in answers if r.status_code == 200]
        refused = [(r, t) for r, t in answers if r.status_code == 429]
        assert len(served) + len(refused) == crowd
        assert len(served) >= 48
        assert all(r.json()["choices"][0]["text"] == TEXT[:8] for r in served)
        assert all(r.headers["retry-after"] for r, _ in refused)
        assert max(t for _, t in refused) < max(t for _, t in answers)
        assert decode.counters.peak_running <= 8
        await until(lambda: idle(gateway))
        await assert_ordinary(gateway)


async def test_a_full_decode_worker_is_passed_over_for_one_with_room(model: TextModel) -> None:
    async with running_gateway(model, scripted(TEXT), decodes=2) as gateway:
        gateway.cluster.decodes[0].behaviour.capacity = 0
        await assert_ordinary(gateway)
        await until(lambda: gateway.cluster.decodes[1].counters.completed == 1)
        assert gateway.cluster.directory.suspects == []


async def test_a_request_waits_for_room_until_its_deadline(model: TextModel) -> None:
    async with running_gateway(model, scripted(TEXT), queue_timeout_s=0.2) as gateway:
        decode = gateway.cluster.decodes[0]
        decode.behaviour.capacity = 0
        response = await gateway.post(COMPLETIONS, LONG)
        assert response.status_code == 503
        assert response.headers["retry-after"]
        await until(lambda: idle(gateway))


async def test_a_waiting_request_goes_on_when_a_worker_reports_room(
    gateway: RunningGateway,
) -> None:
    decode = gateway.cluster.decodes[0]
    decode.behaviour.capacity = 0
    request = asyncio.create_task(gateway.post(COMPLETIONS, {"prompt": "x", "max_tokens": 5}))
    await until(lambda: gateway.gateway.admission.waiting == 1)
    decode.behaviour.capacity = 8
    gateway.cluster.directory.put(decode.record)
    assert (await request).json()["choices"][0]["text"] == TEXT[:5]


async def test_metrics_count_requests_latencies_and_retries(model: TextModel) -> None:
    async with running_gateway(model, scripted(TEXT), decodes=2) as gateway:
        await gateway.cluster.decodes[0].kill()
        await assert_ordinary(gateway)
        await gateway.post(CHAT, {})
        text = (await gateway.client.get("/metrics")).text
    for line in (
        'baton_requests_total{endpoint="completions",status="200"} 1.0',
        'baton_requests_total{endpoint="chat",status="400"} 1.0',
        'baton_retries_total{reason="decode_failed"} 1.0',
        "baton_ttft_seconds_count 1.0",
        "baton_tpot_seconds_count 1.0",
        "baton_e2e_seconds_count 1.0",
        "baton_output_tokens_total 5.0",
        "baton_queue_length 0.0",
        "baton_requests_in_flight 0.0",
    ):
        assert line in text
