"""What a streamed request costs the gateway: its CPU time per request, beside the bare floor's.

Gateway, floor and workers are processes of their own, so the client and the workers cost it
nothing; requests per second and core are requests by the process's own CPU seconds.
"""

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import orjson
import psutil
from _common import Report

from baton.cluster.redis_server import EmbeddedRedis
from baton.cluster.registry import Registry
from baton.cluster.workers import KVLayout, Role, WorkerLoad, WorkerRecord, new_incarnation
from baton.store import resolve

CLIENTS = 64
STREAMS = 1000
START_TIMEOUT_S = 60.0
PEER = Path(__file__).with_name("_gateway_peer.py")


async def measure(report: Report, requests: int) -> None:
    async with stub_cluster() as (url, prefill, decode):
        await _compare(report, url, prefill, decode, requests)


@contextlib.asynccontextmanager
async def stub_cluster() -> AsyncIterator[tuple[str, str, str]]:
    """A Redis with a prefill and a decode worker that only answer: its URL, their addresses."""
    redis = EmbeddedRedis()
    url = await redis.start()
    try:
        with process(str(PEER), "workers") as workers:
            assert workers.stdout is not None
            line = await asyncio.to_thread(workers.stdout.readline)
            prefill, decode = line.split()
            registry = Registry(url)
            announcing = asyncio.create_task(_announce(registry, prefill, decode))
            try:
                yield url, prefill, decode
            finally:
                announcing.cancel()
                await registry.close()
    finally:
        await redis.stop()


def router_flags(port: int, redis_url: str) -> list[str]:
    flags = ["--port", str(port), "--redis", redis_url, "--decode-prefills", "never"]
    return [*flags, "--max-running", "2048", "--log-level", "warning"]


async def _compare(
    report: Report, redis_url: str, prefill: str, decode: str, requests: int
) -> None:
    ports = [free_port(), free_port()]
    with (
        process("-m", "router", *router_flags(ports[0], redis_url)) as gateway,
        process(str(PEER), "floor", prefill, decode, str(ports[1])) as floor,
    ):
        await until_ready(ports[0])
        await until_ready(ports[1], "/openapi.json")
        costs: dict[int, list[float]] = {port: [] for port in ports}
        for _ in range(3):  # in turn, so that a busy machine slows both alike
            for port, child in zip(ports, (gateway, floor), strict=True):
                costs[port].append(await cpu_s(port, child, requests))
        ours, bare = (min(costs[port]) for port in ports)
        report.add("gateway.req_s_core", 1 / ours, "requests/s")
        report.add("gateway.floor_req_s_core", 1 / bare, "requests/s")
        report.add("gateway.vs_floor", bare / ours, "x")
        failed = await _streams(ports[0])
        report.add("gateway.streams", STREAMS - failed, "streams")


async def cpu_s(port: int, child: "subprocess.Popen[str]", requests: int) -> float:
    """CPU seconds of the process per request."""
    before = _cpu_time_s(child.pid)
    await send(port, requests, CLIENTS)
    return (_cpu_time_s(child.pid) - before) / requests


async def send(port: int, requests: int, clients: int) -> None:
    """So many streamed requests, each client one after the other."""
    left = iter(range(requests))

    async def client() -> None:
        for _ in left:
            await _request(port, [1, 2, 3, 4, 5, 6, 7, 8])

    await asyncio.gather(*(client() for _ in range(clients)))


def _cpu_time_s(pid: int) -> float:
    """To the nanosecond where Linux counts so, else in ticks of 10 ms."""
    threads = list(Path(f"/proc/{pid}/task").glob("*/schedstat"))
    if threads:
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


async def _streams(port: int) -> int:
    """How many of so many slow streams at once did not end well."""
    results = await asyncio.gather(
        *(_request(port, [5]) for _ in range(STREAMS)), return_exceptions=True
    )
    return sum(isinstance(result, BaseException) for result in results)


async def _request(port: int, prompt: list[int]) -> None:
    """One streamed request to its end over a bare socket. Raises OSError when it goes wrong."""
    body = orjson.dumps({"prompt": prompt, "max_tokens": 16, "stream": True, "seed": 1})
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        )
        writer.write(head + body)
        answer = await reader.read(-1)
        if b" 200 " not in answer[:20] or b"data: [DONE]" not in answer:
            raise OSError(answer[:300])
    finally:
        writer.close()


async def _announce(registry: Registry, prefill: str, decode: str) -> None:
    stored = resolve("smollm2", progress=False)
    layout = KVLayout(stored.fingerprint, 30, 3, 64, 16, "bfloat16")
    records = [
        WorkerRecord(
            worker_id=f"{role}-0",
            incarnation=new_incarnation(),
            role=role,
            address=address,
            model=stored.name,
            layout=layout,
            max_model_len=8192,
            max_num_seqs=4096,
            num_blocks=1_000_000,
            load=WorkerLoad(free_blocks=1_000_000),
            streams_replies=True,
        )
        for role, address in ((Role.PREFILL, prefill), (Role.DECODE, decode))
    ]
    while True:
        for record in records:
            await registry.publish(record, 30.0)
        await asyncio.sleep(1.0)


@contextlib.contextmanager
def process(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    child = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


async def until_ready(port: int, path: str = "/health/ready") -> None:
    """Until the path is there. Raises TimeoutError."""
    async with asyncio.timeout(START_TIMEOUT_S):
        while not await _is_there(port, path):  # noqa: ASYNC110 (another process has no event)
            await asyncio.sleep(0.1)


async def _is_there(port: int, path: str) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        writer.write(b"GET %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % path.encode())
        return b" 200 " in (await reader.read(-1))[:20]
    finally:
        writer.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
