"""A whole cluster in this process: Redis, workers and router over real sockets.

Every part is the product's own, booted as its process would boot it; only the weights are
shared between workers. Since they live here, tests can read the workers' books.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import uvicorn
from starlette.types import ASGIApp

from baton.cli import worker_process
from baton.cluster.redis_server import EmbeddedRedis
from baton.cluster.registry import Directory, Registry
from baton.cluster.settings import DecodeSettings, PrefillSettings, RouterSettings, WorkerSettings
from baton.cluster.workers import Role
from baton.engine.decode_scheduler import DecodeScheduler
from baton.engine.loader import load_model
from baton.engine.prefill_scheduler import PrefillScheduler
from baton.store import StoredModel, resolve
from baton.v1 import worker_pb2, worker_pb2_grpc
from baton.worker.boot import Parts, boot
from baton.worker.lifecycle import StopSignals
from router.app import create_app
from router.gateway import Gateway
from router.serving import server_config
from router.shared import Shared
from router.text import load_text_model
from tests.support.answers import Answer, gather_events, whole_answer

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ORDINARY = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
START_TIMEOUT_S = 30.0
SETTLE_TIMEOUT_S = 10.0


@lru_cache
def shared_weights(path: Path, dtype: str) -> Any:
    """As `load_model`; every worker and oracle of this process uses the same tensors."""
    return load_model(path, dtype)


@dataclass
class ClusterWorker:
    """One worker of the cluster, its insides in reach."""

    settings: WorkerSettings
    parts: Parts[Any]
    signals: StopSignals
    task: asyncio.Task[None]

    @property
    def blocks(self) -> Any:
        return self.parts.engine.blocks

    @property
    def scheduler(self) -> Any:
        return self.parts.engine.scheduler

    def assert_books_at_baseline(self) -> None:
        """No block is held or promised, no sequence is left."""
        self.blocks.check_integrity([])
        assert self.blocks.num_free == self.blocks.num_blocks
        assert self.blocks.num_promised == 0 and self.scheduler.num_promised_seqs == 0
        assert not list(self.scheduler.sequences())

    async def stop(self) -> None:
        """At once, as after a second signal."""
        self.signals.request()
        self.signals.request()
        await self.task


@dataclass(frozen=True)
class Router:
    """One router of the cluster, and a client of it."""

    gateway: Gateway
    client: httpx.AsyncClient
    port: int


@dataclass
class Cluster:
    """Talk to it with `client`; `settle` waits for, and checks, the state of rest."""

    model: StoredModel
    redis_url: str
    worker_values: dict[str, Any]
    usual: str = ""
    prefills: list[ClusterWorker] = field(default_factory=list)
    decodes: list[ClusterWorker] = field(default_factory=list)

    redis: EmbeddedRedis = field(init=False)
    router: Router = field(init=False)

    @property
    def gateway(self) -> Gateway:
        return self.router.gateway

    @property
    def client(self) -> httpx.AsyncClient:
        return self.router.client

    @property
    def port(self) -> int:
        return self.router.port

    # --- requests ---------------------------------------------------------------------------

    async def post(self, path: str, **body: Any) -> httpx.Response:
        response = await self.client.post(path, json=body)
        assert "Traceback (most recent call last)" not in response.text
        return response

    async def ask(self, path: str, *, stream: bool = False, **body: Any) -> Answer:
        """The answer to a good request, whichever way it comes."""
        if not stream:
            response = await self.post(path, **body)
            assert response.status_code == 200, response.text
            return whole_answer(response.json())
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with self.client.stream("POST", path, json=body) as response:
            assert response.status_code == 200, await response.aread()
            return await gather_events(response)

    async def learn_the_usual(self) -> None:
        self.usual = (await self.ask(COMPLETIONS, **ORDINARY)).text

    async def assert_unharmed(self) -> None:
        """Every worker lives and is at its baseline; an ordinary request is served as ever."""
        assert not any(worker.task.done() for worker in self.workers)
        await self.settle()
        await self.wait_for_workers()
        assert (await self.ask(COMPLETIONS, **ORDINARY)).text == self.usual
        await self.settle()

    # --- workers ----------------------------------------------------------------------------

    @property
    def workers(self) -> list[ClusterWorker]:
        return self.prefills + self.decodes

    async def add_prefill(self, **values: Any) -> ClusterWorker:
        name = f"prefill-{len(self.prefills)}"
        settings = PrefillSettings.build(**self._values(name, values))
        self.prefills.append(_run(settings, self._boot(settings, PrefillScheduler)))
        return self.prefills[-1]

    async def add_decode(self, **values: Any) -> ClusterWorker:
        name = f"decode-{len(self.decodes)}"
        settings = DecodeSettings.build(**self._values(name, values))
        self.decodes.append(_run(settings, self._boot(settings, DecodeScheduler)))
        return self.decodes[-1]

    def _values(self, name: str, values: dict[str, Any]) -> dict[str, Any]:
        own = {"worker_id": name, "redis_url": self.redis_url, "model": self.model.name}
        return {**own, **self.worker_values, **values}

    def _boot(self, settings: WorkerSettings, scheduler_type: type) -> Parts[Any]:
        with (
            mock.patch("baton.worker.boot.load_model", shared_weights),
            mock.patch("baton.worker.boot.resolve", lambda *_, **__: self.model),
        ):
            return boot(settings, scheduler_type)

    def boot_again(self, settings: WorkerSettings, *arguments: Any) -> Parts[Any]:
        """As `boot`, for a worker of ours that goes on in another role."""
        worker = next(w for w in self.workers if w.settings.worker_id == settings.worker_id)
        worker.settings, worker.parts = settings, boot(settings, *arguments)
        workers = self.workers
        self.prefills = [w for w in workers if isinstance(w.settings, PrefillSettings)]
        self.decodes = [w for w in workers if isinstance(w.settings, DecodeSettings)]
        return worker.parts

    # --- books ------------------------------------------------------------------------------

    async def info(self, worker: ClusterWorker) -> worker_pb2.WorkerInfo:
        """What the worker itself says when asked over gRPC."""
        records = self.gateway.directory.snapshot()
        address = next(r.address for r in records if r.worker_id == worker.settings.worker_id)
        stub = worker_pb2_grpc.WorkerStub(self.gateway.channels.get(address))
        return await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=10)

    async def totals(self, workers: list[ClusterWorker]) -> worker_pb2.WorkerCounters:
        """The workers' counters, summed."""
        total = worker_pb2.WorkerCounters()
        for worker in workers:
            for descriptor, value in (await self.info(worker)).counters.ListFields():
                setattr(total, descriptor.name, getattr(total, descriptor.name) + value)
        return total

    async def settle(self, timeout_s: float = SETTLE_TIMEOUT_S) -> None:
        """Waits until every worker is back to its baseline; else says what is not."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            try:
                return await self._assert_at_rest()
            except (AssertionError, RuntimeError):
                if loop.time() > deadline:
                    raise
            await asyncio.sleep(0.02)

    async def _assert_at_rest(self) -> None:
        for worker in self.workers:
            if worker.task.done():
                continue  # stopped by the test
            worker.assert_books_at_baseline()
            assert (await self.info(worker)).load.handoffs_in_flight == 0
        assert self.gateway.admission.running == self.gateway.admission.waiting == 0

    async def wait_for_workers(self) -> None:
        """Until the router knows every worker that runs."""
        names = {w.settings.worker_id for w in self.workers if not w.task.done()}
        directory = self.gateway.directory
        async with asyncio.timeout(START_TIMEOUT_S):
            while {record.worker_id for record in directory.snapshot()} != names:
                for worker in self.workers:
                    if worker.task.done():
                        worker.task.result()
                await directory.wait_changed(0.2)


def _run(settings: WorkerSettings, parts: Parts[Any]) -> ClusterWorker:
    signals = StopSignals(Role)
    task = asyncio.create_task(worker_process.live(settings, parts, signals))
    return ClusterWorker(settings, parts, signals, task)


@contextlib.asynccontextmanager
async def running_cluster(
    model: str | StoredModel = "smollm2",
    prefills: int = 1,
    decodes: int = 1,
    *,
    router: dict[str, Any] | None = None,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    redis_url: str | None = None,
    **worker: Any,
) -> AsyncIterator[Cluster]:
    """Keyword arguments are worker settings; `prefill` and `decode` are those of one role.
    `redis_url`: a Redis of the caller's."""
    stored = resolve(model, progress=False) if isinstance(model, str) else model
    redis = EmbeddedRedis()
    url = redis_url or await redis.start()
    values = {
        "dtype": "float32",
        "chunk_size": 64,
        "num_blocks": 256,
        "threads": 1,
        "self_profile": False,
        **worker,
    }
    cluster = Cluster(stored, url, values)
    cluster.redis = redis
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(redis.stop)
        cluster.router = await stack.enter_async_context(running_router(cluster, **(router or {})))
        again = mock.patch("baton.cli.worker_process.boot", cluster.boot_again)
        stack.enter_context(again)
        stack.push_async_callback(_stop_workers, cluster)
        for _ in range(prefills):
            await cluster.add_prefill(**(prefill or {}))
        for _ in range(decodes):
            await cluster.add_decode(**(decode or {}))
        await cluster.wait_for_workers()
        yield cluster


async def _stop_workers(cluster: Cluster) -> None:
    await asyncio.gather(*(worker.stop() for worker in cluster.workers))


@contextlib.asynccontextmanager
async def running_router(cluster: Cluster, **values: Any) -> AsyncIterator[Router]:
    """`values` are router settings. The client keeps no connection: each request is a new one."""
    stored = cluster.model
    settings = RouterSettings.build(
        **{
            "redis_url": cluster.redis_url,
            "model": stored.name,
            "decode_prefills": "never",  # tests count hand-offs
        }
        | values
    )
    registry = Registry(cluster.redis_url)
    gateway = Gateway(
        settings,
        Directory(registry),
        lambda: load_text_model(stored.name, stored.path, stored.fingerprint),
        Shared(cluster.redis_url),
    )
    loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    app = create_app(
        gateway,
        lambda failure: loaded.set_exception(failure) if failure else loaded.set_result(None),
    )
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            async with _http(app, settings, listener):
                async with asyncio.timeout(START_TIMEOUT_S):
                    await loaded
                limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
                async with httpx.AsyncClient(
                    base_url=f"http://127.0.0.1:{port}", timeout=100, limits=limits
                ) as client:
                    yield Router(gateway, client, port)
    finally:
        await registry.close()


@contextlib.asynccontextmanager
async def _http(
    app: ASGIApp, settings: RouterSettings, listener: socket.socket
) -> AsyncIterator[None]:
    """uvicorn without signal handlers: those belong to pytest."""
    config = server_config(app, settings)
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[listener])
    try:
        yield
    finally:
        await server.shutdown(sockets=[listener])
