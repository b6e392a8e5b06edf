"""The real gateway on a free loopback port, over stub workers."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import orjson
import uvicorn
from starlette.types import ASGIApp

from baton.cluster.settings import RouterSettings
from router.app import create_app
from router.gateway import Gateway
from router.serving import server_config
from router.shared import Shared
from router.text import TextModel
from tests.support.stub_workers import Script, StubCluster

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER_HI = [{"role": "user", "content": "hi"}]


@contextlib.asynccontextmanager
async def _serving(
    app: ASGIApp, settings: RouterSettings, listener: socket.socket
) -> AsyncIterator[None]:
    """uvicorn without its signal handlers (those belong to pytest) and its 0.1 s ticks."""
    config = server_config(app, settings)
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[listener])
    try:
        yield
    finally:
        await server.shutdown(sockets=[listener])


@dataclass
class RunningGateway:
    gateway: Gateway
    cluster: StubCluster
    client: httpx.AsyncClient
    listener: socket.socket

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return await self.client.post(path, json=body, **kwargs)

    async def events(self, path: str, body: dict[str, Any], **kwargs: Any) -> list[Any]:
        """The chunks of a stream, "[DONE]" as a string; fails on anything but SSE lines."""
        body = {**body, "stream": True}
        async with self.client.stream("POST", path, json=body, **kwargs) as response:
            if response.status_code != 200:
                raise AssertionError((response.status_code, await response.aread()))
            return [event async for event in sse_events(response)]


async def sse_events(response: httpx.Response) -> AsyncIterator[Any]:
    async for line in response.aiter_lines():
        if not line:
            continue
        assert line.startswith("data: "), line
        data = line.removeprefix("data: ")
        yield data if data == "[DONE]" else orjson.loads(data)


@contextlib.asynccontextmanager
async def running_gateway(
    model: TextModel | Callable[[], TextModel],
    script: Script,
    eos: int | None = None,
    prefills: int = 1,
    decodes: int = 1,
    redis_url: str | None = None,
    streams_replies: bool = True,
    **settings: Any,
) -> AsyncIterator[RunningGateway]:
    cluster = StubCluster(script, eos, streams_replies)
    for _ in range(prefills):
        await cluster.add_prefill()
    for _ in range(decodes):
        await cluster.add_decode()
    load = model if callable(model) else lambda: model
    config = RouterSettings.build(**{"model": "bytes", "decode_prefills": "never", **settings})
    gateway = Gateway(config, cluster.directory, load, Shared(redis_url))  # type: ignore[arg-type]
    loaded = asyncio.Event()
    app = create_app(gateway, lambda failure: loaded.set())
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        try:
            async with _serving(app, config, listener):
                if not callable(model):
                    async with asyncio.timeout(10):
                        await loaded.wait()
                limits = httpx.Limits(max_connections=None)
                async with httpx.AsyncClient(
                    base_url=f"http://127.0.0.1:{port}", timeout=30, limits=limits
                ) as client:
                    yield RunningGateway(gateway, cluster, client, listener)
        finally:
            await cluster.stop()


async def until(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    """Waits for a condition that has no event to await."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (the states watched have no event)
            await asyncio.sleep(0.005)


def joined(events: list[Any], index: int = 0) -> tuple[str, list[str]]:
    """The text and the finish reasons of one choice of a stream."""
    text, reasons = "", []
    for event in events:
        if event == "[DONE]":
            continue
        for choice in event.get("choices", []):
            if choice["index"] == index:
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                if choice["finish_reason"] is not None:
                    reasons.append(choice["finish_reason"])
    return text, reasons
