"""One connected trace per request arrives at a collector; none without an endpoint."""

import asyncio
import contextlib
import gzip
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from baton.cluster.errors import SettingsError
from baton.cluster.logging import _JsonFormatter, current_request
from baton.cluster.settings import RouterSettings
from router.text import TextModel
from router.tracing import parent_of
from tests.support.byte_model import byte_model
from tests.support.gateway import COMPLETIONS, running_gateway
from tests.support.stub_workers import scripted

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BODY = {"prompt": "hi", "max_tokens": 6}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return byte_model(Path(tmp_path_factory.mktemp("model")))


@contextlib.asynccontextmanager
async def collector() -> AsyncIterator[tuple[str, list[Any]]]:
    """The endpoint, and (service instance, span) of all that it was sent."""
    received: list[Any] = []

    async def take(request: web.Request) -> web.Response:
        data = await request.read()
        if request.headers.get("content-encoding") == "gzip":
            data = gzip.decompress(data)
        for group in ExportTraceServiceRequest.FromString(data).resource_spans:
            names = {a.key: a.value.string_value for a in group.resource.attributes}
            for scope in group.scope_spans:
                received.extend((names["service.instance.id"], span) for span in scope.spans)
        return web.Response(body=b"", content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces", received
    finally:
        await runner.cleanup()


async def traced(model: TextModel, **headers: str) -> list[Any]:
    """Spans of one request; the gateway sends what it has when it stops."""
    async with collector() as (endpoint, received):
        async with running_gateway(model, scripted("ok"), otlp_endpoint=endpoint) as running:
            response = await running.post(COMPLETIONS, BODY, headers=headers)
            assert response.status_code == 200
        return received


async def test_a_request_is_one_connected_trace_below_the_clients_span(model: TextModel) -> None:
    spans = await traced(model, traceparent=f"00-{TRACE}-{PARENT}-01")
    assert {span.trace_id.hex() for _, span in spans} == {TRACE}
    (root,) = [span for _, span in spans if span.parent_span_id.hex() == PARENT]
    others = [span for _, span in spans if span is not root]
    assert others and all(span.parent_span_id == root.span_id for span in others)
    names = {span.name for span in others}
    assert {"receive", "tokenise", "admission", "placement", "reserve"} <= names
    for span in others:
        assert root.start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano
    told = {a.key: a.value for a in root.attributes}
    assert told["gen_ai.usage.output_tokens"].int_value == 6
    assert told["http.response.status_code"].int_value == 200


async def test_without_a_parent_a_trace_of_its_own_begins(model: TextModel) -> None:
    spans = await traced(model, traceparent="nonsense")
    assert len({span.trace_id for _, span in spans}) == 1
    assert len([span for _, span in spans if not span.parent_span_id]) == 1


async def test_an_unsampled_parent_is_obeyed(model: TextModel) -> None:
    assert await traced(model, traceparent=f"00-{TRACE}-{PARENT}-00") == []


@pytest.mark.parametrize(
    "text", [None, "", "x", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01"]
)
def test_what_is_no_parent_is_ignored(text: str | None) -> None:
    assert parent_of(text) is None


def test_an_endpoint_that_is_no_address_is_refused() -> None:
    with pytest.raises(SettingsError, match="otlp"):
        RouterSettings.build(otlp_endpoint="localhost:4318")


async def test_a_collector_that_is_gone_disturbs_nobody(model: TextModel) -> None:
    gone = "http://127.0.0.1:9/v1/traces"
    async with running_gateway(model, scripted("ok"), otlp_endpoint=gone) as running:
        answers = await asyncio.gather(*(running.post(COMPLETIONS, BODY) for _ in range(5)))
        assert all(answer.status_code == 200 for answer in answers)


def test_json_lines_name_the_request_that_they_belong_to() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "hello", None, None)
    formatter = _JsonFormatter("router")
    assert "request_id" not in orjson.loads(formatter.format(record))
    token = current_request.set("req-7")
    try:
        assert orjson.loads(formatter.format(record))["request_id"] == "req-7"
    finally:
        current_request.reset(token)
