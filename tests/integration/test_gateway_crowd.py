"""A thousand streams at once through a router that is a process, over scripted workers."""

import asyncio
import contextlib
import dataclasses
import subprocess
import sys
from collections.abc import AsyncIterator

import orjson
import psutil
import pytest

from baton.cluster.redis_server import EmbeddedRedis
from baton.cluster.registry import Registry
from baton.cluster.workers import WorkerLoad
from baton.store import StoredModel, resolve
from tests.support.gateway import COMPLETIONS
from tests.support.redis import eventually, until
from tests.support.stub_workers import StubCluster, scripted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

STREAMS = 1000
TOKENS = 16
LEASE_S = 600.0
# Workers, Redis and clients share this machine: how busy it is must not decide.
LIMITS = ["--max-running", str(2 * STREAMS), "--reserve-timeout-s", "120"]
PATIENT = [*LIMITS, "--peer-timeout-s", "120", "--log-level", "warning"]


@dataclasses.dataclass
class Crowd:
    """The router listens on `port`; its workers stop before their fourth token until `gate`."""

    router: psutil.Process
    port: int
    workers: StubCluster
    gate: asyncio.Event

    async def stream(self) -> bytes:
        body = orjson.dumps({"prompt": "hi", "max_tokens": TOKENS, "stream": True})
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = (
            f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        try:
            writer.write(head.encode() + body)
            return await reader.read(-1)
        finally:
            writer.close()

    async def wave(self) -> None:
        """All of them at once: none is whole before every one has begun."""
        self.gate.clear()
        (decode,) = self.workers.decodes
        asked = [asyncio.create_task(self.stream()) for _ in range(STREAMS)]
        await eventually(lambda: decode.counters.running == STREAMS, timeout_s=120)
        self.gate.set()
        for answer in await asyncio.gather(*asked):
            assert b" 200 " in answer[:20] and answer.count(b"data: ") >= 3, answer[:300]
            assert b'"finish_reason":"length"' in answer and b"data: [DONE]" in answer

    async def sockets_at_most(self, count: int) -> None:
        await eventually(lambda: len(self.router.net_connections()) <= count, timeout_s=60)


@pytest.fixture
async def crowd(tiny_chat: StoredModel) -> AsyncIterator[Crowd]:
    async with contextlib.AsyncExitStack() as stack:
        redis = EmbeddedRedis()
        url = await redis.start()
        stack.push_async_callback(redis.stop)
        workers, gate = StubCluster(scripted("abcdefgh")), asyncio.Event()
        stack.push_async_callback(workers.stop)
        await announce(workers, url, resolve(str(tiny_chat.path), progress=False))
        hold_before_fourth_token(workers, gate)
        flags = ["--redis-url", url, "--model", str(tiny_chat.path), "--port", "0", *PATIENT]
        command = [sys.executable, "-m", "router", "--decode-prefills", "never", *flags]
        process = subprocess.Popen(command)  # noqa: ASYNC220 (it takes no time)
        stack.callback(process.wait)
        stack.callback(process.kill)
        made = Crowd(psutil.Process(process.pid), 0, workers, gate)
        await eventually(lambda: bool(listening(made.router)), timeout_s=60)
        made.port = listening(made.router)[0]
        gate.set()
        await until(lambda: answers(made), timeout_s=60)
        yield made
        assert process.poll() is None, "the router ended"


async def announce(workers: StubCluster, redis_url: str, model: StoredModel) -> None:
    """Workers of this model with room for everybody."""
    registry = Registry(redis_url)
    for worker in (await workers.add_prefill(), await workers.add_decode()):
        layout = dataclasses.replace(worker.record.layout, fingerprint=model.fingerprint)
        room = {"max_num_seqs": 2 * STREAMS, "num_blocks": 10**6}
        load = WorkerLoad(free_blocks=10**6)
        record = dataclasses.replace(worker.record, layout=layout, load=load, **room)
        await registry.publish(record, LEASE_S)
    await registry.close()


def hold_before_fourth_token(workers: StubCluster, gate: asyncio.Event) -> None:
    async def hold(context: object, index: int) -> None:
        if index == 3:
            await gate.wait()

    (decode,) = workers.decodes
    decode._maybe_fail = hold  # type: ignore[method-assign,assignment]


def listening(process: psutil.Process) -> list[int]:
    return [c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]


async def answers(crowd: Crowd) -> bool:
    return b"data: [DONE]" in await crowd.stream()


async def test_a_thousand_streams_at_once_leave_no_socket_and_no_memory(crowd: Crowd) -> None:
    """vllm-project/production-stack#448: the router fell over at 1,000 streams."""
    before = len(crowd.router.net_connections())
    await crowd.wave()
    await crowd.sockets_at_most(before + 2)
    grown = crowd.router.memory_info().rss
    for _ in range(2):
        await crowd.wave()
    await crowd.sockets_at_most(before + 2)
    assert crowd.router.memory_info().rss < 1.2 * grown
    assert await answers(crowd)
