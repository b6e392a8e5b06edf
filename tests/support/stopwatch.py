"""A client with a stopwatch: one HTTP request over a bare socket, timed at its ends.

Nothing is parsed while the clock runs, so what it says is what a client can see. It also
watches how late the event loop is, because it shares it with what it measures.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import orjson


@dataclass
class Timed:
    """`elapsed_s` from sending the request to the last byte (or to leaving)."""

    request_id: str
    elapsed_s: float = 0.0
    lag_s: float = 0.0
    received: bytes = b""
    arrivals: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def events(self) -> list[Any]:
        lines = self.received.decode().splitlines()
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [orjson.loads(line) for line in data if line != "[DONE]"]

    @property
    def json(self) -> Any:
        return orjson.loads(self.received.partition(b"\r\n\r\n")[2])


async def timed_post(
    port: int,
    path: str,
    body: dict[str, Any],
    request_id: str,
    leave_after_bytes: int = 0,
    timing: bool = True,
) -> Timed:
    """With `leave_after_bytes` the client closes the connection once it has read so much."""
    payload = orjson.dumps(body)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        f"x-request-id: {request_id}\r\nx-baton-timing: {int(timing)}\r\n"
        f"content-length: {len(payload)}\r\n\r\n"
    ).encode()
    timed = Timed(request_id)
    async with _watching(timed):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        start = time.perf_counter()
        writer.write(head + payload)
        while data := await reader.read(1 << 20):
            timed.received += data
            timed.arrivals.append((time.perf_counter() - start, data))
            if leave_after_bytes and len(timed.received) >= leave_after_bytes:
                break
        timed.elapsed_s = timed.arrivals[-1][0] if timed.arrivals else 0.0
        writer.close()
    return timed


@contextlib.asynccontextmanager
async def _watching(timed: Timed) -> AsyncIterator[None]:
    async def watch() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            timed.lag_s = max(timed.lag_s, time.perf_counter() - before - 0.001)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
