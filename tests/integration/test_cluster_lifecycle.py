"""Clients that leave, roles that are missing, workers that restart."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
import pytest_asyncio

from baton.engine.async_engine import EngineFailed
from baton.store import StoredModel
from tests.support.cluster import CHAT, COMPLETIONS, ORDINARY, Cluster, running_cluster

LONG = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True, "temperature": 0}
STOPS_WITHIN_S = 2.0


class RawClient:
    """One HTTP request over a socket that the test owns."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def post(cls, cluster: Cluster, body: dict[str, Any]) -> "RawClient":
        reader, writer = await asyncio.open_connection("127.0.0.1", cluster.port)
        payload = json.dumps(body).encode()
        head = (
            f"POST {COMPLETIONS} HTTP/1.1\r\nhost: baton\r\n"
            f"content-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n"
        )
        writer.write(head.encode() + payload)
        await writer.drain()
        return cls(reader, writer)

    async def read_events(self, count: int) -> None:
        for _ in range(count):
            await self.reader.readuntil(b"data: ")

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()

    async def half_close(self) -> None:
        self.writer.write_eof()


def running(cluster: Cluster) -> int:
    return sum(len(list(worker.scheduler.sequences())) for worker in cluster.workers)


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (books have no event to wait for)
            await asyncio.sleep(0.01)


async def assert_stops(cluster: Cluster, leave: Callable[[], Awaitable[None]]) -> None:
    """Work is under way; after `leave` it ends in time and everything is given back."""
    await until(lambda: any(w.scheduler.running for w in cluster.decodes))
    await leave()
    await until(lambda: running(cluster) == 0, STOPS_WITHIN_S)
    await cluster.settle()


# --- the client leaves ----------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Cluster]:
    async with running_cluster() as cluster:
        await cluster.learn_the_usual()
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(shared: Cluster) -> AsyncIterator[Cluster]:
    await shared.wait_for_workers()
    yield shared
    await shared.assert_unharmed()


@pytest.mark.model
@pytest.mark.asyncio(loop_scope="module")
async def test_a_closed_socket_stops_a_request_that_is_not_streamed(cluster: Cluster) -> None:
    client = await RawClient.post(cluster, LONG)
    await asyncio.sleep(0.3)  # the case: a client with this much patience
    await assert_stops(cluster, client.close)


@pytest.mark.model
@pytest.mark.asyncio(loop_scope="module")
async def test_a_closed_socket_stops_a_stream(cluster: Cluster) -> None:
    client = await RawClient.post(cluster, LONG | {"stream": True})
    await client.read_events(3)
    await assert_stops(cluster, client.close)


@pytest.mark.model
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_half_closed_socket_stops_the_work(cluster: Cluster, stream: bool) -> None:
    client = await RawClient.post(cluster, LONG | {"stream": stream})
    if stream:
        await client.read_events(3)
    await assert_stops(cluster, client.half_close)
    await client.close()


@pytest.mark.model
@pytest.mark.asyncio(loop_scope="module")
async def test_a_client_that_leaves_during_prefill_stops_it(cluster: Cluster) -> None:
    client = await RawClient.post(cluster, LONG | {"prompt": [100 + i for i in range(1500)]})
    await until(lambda: any(w.scheduler.running for w in cluster.prefills))
    await client.close()
    await until(lambda: running(cluster) == 0, STOPS_WITHIN_S)
    (prefill,) = cluster.prefills
    assert prefill.scheduler.prefill_tokens_computed < 1500, "it computed the whole prompt"


async def test_a_client_that_leaves_while_queued_is_never_computed(tiny_chat: StoredModel) -> None:
    async with running_cluster(tiny_chat, router={"max_running": 1}) as cluster:
        await cluster.learn_the_usual()
        first = await RawClient.post(cluster, LONG | {"stream": True})
        await first.read_events(1)
        second = await RawClient.post(cluster, LONG | {"prompt": "queued"})
        await until(lambda: cluster.gateway.admission.waiting == 1)
        before = (await cluster.totals(cluster.prefills)).prefill_tokens_computed
        await second.close()
        await until(lambda: cluster.gateway.admission.waiting == 0, STOPS_WITHIN_S)
        await first.close()
        await cluster.settle()
        assert (await cluster.totals(cluster.prefills)).prefill_tokens_computed == before
        await cluster.assert_unharmed()


# --- a role is missing ----------------------------------------------------------------------


def assert_names_the_missing(response: httpx.Response, role: str) -> None:
    assert response.status_code == 503
    error = response.json()["error"]
    assert role in error["message"] and error["code"] == f"no_{role}_worker"
    assert int(response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("missing", ["decode", "prefill"])
async def test_a_missing_role_is_named_with_503_and_its_arrival_is_enough(
    tiny_chat: StoredModel, missing: str
) -> None:
    async with running_cluster(
        tiny_chat, int(missing != "prefill"), int(missing != "decode")
    ) as cluster:
        for path, body in (
            (COMPLETIONS, ORDINARY),
            (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
        ):
            for stream in (False, True):
                assert_names_the_missing(await cluster.post(path, **body, stream=stream), missing)
        ready = await cluster.client.get("/health/ready")
        assert ready.status_code == 503 and ready.json()["missing"] == [missing]
        assert (await cluster.client.get("/health/live")).status_code == 200
        await (cluster.add_decode() if missing == "decode" else cluster.add_prefill())
        await cluster.wait_for_workers()
        await cluster.learn_the_usual()
        assert (await cluster.client.get("/health/ready")).status_code == 200
        await cluster.assert_unharmed()


async def test_a_seed_gives_the_same_text_after_workers_were_replaced(
    tiny_chat: StoredModel,
) -> None:
    body = {"prompt": "Once upon", "seed": 123, "temperature": 0.8, "max_tokens": 40}
    async with running_cluster(tiny_chat) as cluster:
        first = await cluster.ask(COMPLETIONS, **body)
        for worker in cluster.workers:
            await worker.stop()
        await cluster.add_prefill()
        await cluster.add_decode()
        await cluster.wait_for_workers()
        again = await cluster.ask(COMPLETIONS, **body)
        assert again.text == first.text and again.num_cached == 0
        await cluster.settle()


async def test_a_worker_whose_engine_fails_leaves_and_others_do_its_work(
    tiny_chat: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on announcing itself, idle, and took request after request."""

    def fail() -> None:
        raise RuntimeError("boom")

    async with running_cluster(tiny_chat, decodes=2) as cluster:
        await cluster.learn_the_usual()
        broken = cluster.decodes[0]
        monkeypatch.setattr(broken.scheduler, "schedule", fail)
        broken.parts.engine.apply(lambda: None)  # wakes it
        with pytest.raises(EngineFailed):
            async with asyncio.timeout(20):
                await broken.task
        cluster.decodes.remove(broken)
        await cluster.assert_unharmed()
