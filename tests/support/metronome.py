"""An OpenAI-compatible server whose tokens come at known times; it keeps what it was asked.

It schedules on absolute times and writes down when each chunk went out, so that a busy machine
makes its answers late but not its own account of them wrong.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web


@dataclass
class Metronome:
    """`fail_every`: so many requests, one of them is answered 503."""

    ttft_s: float = 0.05
    step_s: float = 0.01
    fail_every: int = 0
    split_events: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    sent: list[list[float]] = field(default_factory=list)
    """Per request: when it arrived, then when each of its chunks was written."""
    url: str = ""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        arrived = time.perf_counter()
        body = orjson.loads(await request.read())
        self.bodies.append(body)
        if self.fail_every and len(self.bodies) % self.fail_every == 0:
            return web.json_response({"error": {"message": "no room"}}, status=503)
        times = [arrived]
        self.sent.append(times)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        due = arrived + self.ttft_s
        for index in range(body["max_tokens"]):
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            delta = {"delta": {"content": "x"}} if "messages" in body else {"text": "x"}
            await self._write(response, {"choices": [{"index": 0, **delta}], "i": index})
            times.append(time.perf_counter())
            due += self.step_s
        prompt = body.get("prompt") or body["messages"][0]["content"]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": body["max_tokens"]}
        await self._write(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _write(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        data = b"data: " + orjson.dumps(event) + b"\n\n"
        if self.split_events:
            await response.write(data[:9])
            await asyncio.sleep(0)
            data = data[9:]
        await response.write(data)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "metronome"}]})


@contextlib.asynccontextmanager
async def running_metronome(**values: Any) -> AsyncIterator[Metronome]:
    metronome = Metronome(**values)
    app = web.Application(client_max_size=1 << 26)
    for path in ("/v1/completions", "/v1/chat/completions"):
        app.router.add_post(path, metronome.generate)
    app.router.add_get("/v1/models", metronome.models)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    metronome.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield metronome
    finally:
        await runner.cleanup()
