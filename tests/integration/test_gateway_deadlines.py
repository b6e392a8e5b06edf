"""A request's own deadline ends it wherever it is, and tells the client so once."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from router.text import TextModel
from tests.support.byte_model import byte_model
from tests.support.gateway import COMPLETIONS, RunningGateway, joined, running_gateway, until
from tests.support.stub_workers import scripted

TEXT = "Time and tide wait for no man. "
LONG = {"prompt": "x", "max_tokens": 400}
SOON = {"x-request-timeout-ms": "150"}
LATER = {"x-request-timeout-ms": "1500"}
"""Enough for what a stage shows."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return byte_model(Path(tmp_path_factory.mktemp("model")))


def stall(gateway: RunningGateway, stage: str) -> None:
    """Requests get no further than `stage`."""
    (prefill,), (decode,) = gateway.cluster.prefills, gateway.cluster.decodes
    if stage == "queued":
        gateway.gateway.admission._max_running = 0
    elif stage == "refused for lack of room":
        decode.behaviour.capacity = 0
    elif stage == "reserving":
        decode.behaviour.hang = True
    elif stage == "in prefill":
        prefill.behaviour.hang = True
    elif stage == "in mid-hand-off":
        prefill.behaviour.hang, prefill.behaviour.fail_at = True, 1
    elif stage == "in mid-decode":
        decode.behaviour.hang, decode.behaviour.fail_at = True, 5


STAGES = {
    "queued": 0,
    "refused for lack of room": 0,
    "reserving": 0,
    "in prefill": 0,
    "in mid-hand-off": 1,
    "in mid-decode": 5,
}
"""Stage → tokens that a stream has shown by then, at most."""


@pytest.mark.parametrize("stage", STAGES)
async def test_the_deadline_ends_a_request_at_every_stage(model: TextModel, stage: str) -> None:
    async with running_gateway(model, scripted(TEXT)) as gateway:
        stall(gateway, stage)
        headers = LATER if STAGES[stage] else SOON
        async with asyncio.timeout(30):
            whole = await gateway.post(COMPLETIONS, LONG, headers=headers)
            body = {**LONG, "stream": True}
            streamed = await gateway.post(COMPLETIONS, body, headers=headers)
        assert whole.status_code == 504
        assert whole.json()["error"]["code"] == "timeout"
        assert whole.json()["error"]["request_id"] == whole.headers["x-request-id"]
        if STAGES[stage]:
            assert streamed.status_code == 200
            events = [orjson.loads(line[6:]) for line in streamed.text.split("\n\n") if line]
            text, reasons = joined(events[:-1])
            assert TEXT[: STAGES[stage]].startswith(text), "a slow machine shows fewer"
            assert reasons == [], "no false finish reason"
            assert events[-1]["error"]["code"] == "timeout", "and nothing after it"
        else:
            assert streamed.status_code == 504
            assert streamed.json()["error"]["code"] == "timeout"
        await until(lambda: gateway.cluster.running == 0)
        admission = gateway.gateway.admission
        assert (admission.running, admission.waiting) == (0, 0)
        assert gateway.cluster.directory.suspects == [], "the worker has done nothing wrong"


async def test_a_client_that_stopped_reading_does_not_outlive_its_deadline(
    model: TextModel,
) -> None:
    async with running_gateway(model, scripted(TEXT)) as gateway:
        body = orjson.dumps({"prompt": "x" * 100, "max_tokens": 400, "n": 16, "stream": True})
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        gateway.cluster.decodes[0].behaviour.hang = True
        gateway.cluster.decodes[0].behaviour.fail_at = 390
        writer.write(head.encode() + b"x-request-timeout-ms: 300\r\n\r\n" + body)
        await until(lambda: gateway.cluster.running > 0)
        await until(lambda: gateway.cluster.running == 0)
        await until(lambda: gateway.gateway.admission.running == 0)
        writer.close()


@pytest.mark.parametrize("value", ["", "0", "-5", "1.5", "ten", "1e3", "１０", "1 0", "0x10"])
async def test_a_malformed_deadline_is_refused_by_name(model: TextModel, value: str) -> None:
    async with running_gateway(model, scripted(TEXT)) as gateway:
        headers: Any = {"x-request-timeout-ms": value.encode()}
        for body in (LONG, {**LONG, "stream": True}):
            response = await gateway.post(COMPLETIONS, body, headers=headers)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "x-request-timeout-ms"
            assert "x-request-timeout-ms" in response.json()["error"]["message"]
        assert gateway.cluster.calls == 0


async def test_the_server_has_a_longest_and_a_usual_deadline(model: TextModel) -> None:
    limits = {"request_timeout_s": 2.0, "default_request_timeout_s": 0.1}
    async with running_gateway(model, scripted(TEXT), **limits) as gateway:
        stall(gateway, "in prefill")
        loop = asyncio.get_running_loop()

        async def lives(headers: dict[str, str]) -> float:
            began = loop.time()
            response = await gateway.post(COMPLETIONS, LONG, headers=headers)
            assert response.status_code == 504
            return loop.time() - began

        assert 0.1 <= await lives({}) < 2.0 <= await lives({"x-request-timeout-ms": "9" * 5000})
        assert 2.0 <= await lives({"x-request-timeout-ms": "60000"}) < 30


async def test_a_deadline_that_is_long_enough_changes_nothing(model: TextModel) -> None:
    async with running_gateway(model, scripted(TEXT)) as gateway:
        headers = {"x-request-timeout-ms": "20000"}
        response = await gateway.post(COMPLETIONS, {**LONG, "max_tokens": 9}, headers=headers)
        assert response.json()["choices"][0]["text"] == TEXT[:9]
