"""A Ray cluster of several nodes on this machine, and Baton on it, supervised by the test."""

import asyncio
import contextlib
import secrets
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
import httpx
import psutil
import ray
from baton_ray.placer import Placer, this_node
from baton_ray.process import Place
from baton_ray.session import OBJECT_STORE_BYTES, ray_ground
from ray.cluster_utils import Cluster

from baton.cli.supervisor import Supervisor
from baton.cli.up import make_site, run
from baton.cli.up_settings import UpSettings
from baton.v1 import worker_pb2, worker_pb2_grpc
from tests.support.answers import Answer, gather_events

COMPLETIONS = "/v1/completions"
START_S = 240.0
REST_S = 30.0
CPUS = 2
T = TypeVar("T")
HELD = ("waiting", "running", "handoffs_in_flight", "promised_blocks")


class RayNodes:
    """The head takes no worker, so that any other node may be lost. `home`: the model store of all
    that runs on them."""

    def __init__(self, nodes: int, home: Path, **head: Any) -> None:
        self._wanted = nodes
        self.home = home
        self._cluster = Cluster(initialize_head=True, head_node_args=_node(0) | head)
        self._nodes = [self._cluster.add_node(**_node(CPUS)) for _ in range(nodes)]

    def connect(self) -> None:
        """This process becomes a driver."""
        ray.init(address=self.address, namespace="baton")

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def lose(self, node_id: str) -> None:
        """All its processes are killed."""
        (node,) = [n for n in self._nodes if n.node_id == node_id]
        self._nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def restore(self) -> None:
        """As many nodes as at the start; from the main thread."""
        for _ in range(self._wanted - len(self._nodes)):
            self._nodes.append(self._cluster.add_node(**_node(CPUS)))

    def shutdown(self) -> None:
        self._cluster.shutdown()


def _node(cpus: int) -> dict[str, Any]:
    return {
        "num_cpus": cpus,
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_dashboard": False,
    }


@dataclass
class BatonOnRay:
    """`said`: the supervisor's lines."""

    settings: UpSettings
    url: str
    placer: Placer
    said: list[str] = field(default_factory=list)
    supervisor: Supervisor = field(init=False)

    def say(self, name: str, line: str) -> None:
        self.said.append(f"{name}: {line}")

    @property
    def restarts(self) -> list[str]:
        return [line for line in self.said if "starting it again" in line]

    def place(self, name: str) -> Place:
        place = self.placer.children[name].place
        assert place is not None
        return place

    def kill_actor(self, name: str) -> None:
        """The process of the actor; the worker is its child."""
        actor = psutil.Process(self.place(name).pid).parent()
        assert actor is not None and "ray::Process" in " ".join(actor.cmdline()), actor
        actor.send_signal(signal.SIGKILL)

    # --- requests -----------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self.url, timeout=120, limits=limits) as client:
            yield client

    async def ask(self, path: str = COMPLETIONS, **body: Any) -> Answer:
        """A streamed answer, read to its end; its cache is its own unless it names another."""
        body = {"stream": True, "stream_options": {"include_usage": True}, **body}
        body.setdefault("cache_salt", secrets.token_hex(8))
        async with self.client() as client, client.stream("POST", path, json=body) as response:
            assert response.status_code == 200, await response.aread()
            return await gather_events(response)

    # --- workers ------------------------------------------------------------------------------

    async def records(self) -> list[dict[str, Any]]:
        async with self.client() as client:
            return list((await client.get("/workers")).json()["workers"])

    async def names(self, role: str = "") -> set[str]:
        found = [r for r in await self.records() if r["role"].startswith(role)]
        return {record["worker_id"] for record in found if not record["load"]["draining"]}

    async def busy(self, role: str) -> str:
        """The worker of a role that has a sequence now."""
        return await until(lambda: self._find_busy(role), REST_S)

    async def _find_busy(self, role: str) -> str:
        for record in await self.records():
            if record["role"] == role and (await info(record["address"])).load.running:
                return str(record["worker_id"])
        raise AssertionError(f"no {role} worker is busy")

    async def continued(self) -> float:
        """Choices that went on at another worker, since the router began."""
        async with self.client() as client:
            lines = (await client.get("/metrics")).text.splitlines()
        counts = [line for line in lines if line.startswith('baton_retries_total{reason="cont')]
        return sum(float(line.split()[-1]) for line in counts)

    async def wait_workers(self, *names: str, timeout_s: float = START_S) -> None:
        async def check() -> None:
            assert await self.names() == set(names), (await self.names(), self.said[-5:])

        await until(check, timeout_s)

    async def wait_at_rest(self) -> None:
        """No worker holds a block, a promise, a sequence or a hand-off."""

        async def check() -> None:
            for record in await self.records():
                found = await info(record["address"])
                held = {name: getattr(found.load, name) for name in HELD}
                assert not any(held.values()), (record["worker_id"], held)
                assert found.load.free_blocks == found.num_blocks, record["worker_id"]

        await until(check, REST_S)


async def info(address: str) -> worker_pb2.WorkerInfo:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        return await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=2)


async def until(check: Callable[[], Awaitable[T]], timeout_s: float) -> T:
    """What `check` gives once it passes; its last failure when it does not pass in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return await check()
        except (AssertionError, httpx.HTTPError, grpc.aio.AioRpcError):
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def baton_on_ray(**values: Any) -> AsyncIterator[BatonOnRay]:
    """Ready, on the cluster that this process is connected to. `values`: of `baton up`."""
    usual = {"dtype": "float32", "num_blocks": 256, "chunk_size": 64, "decode_prefills": "never"}
    given = {"ray": "auto", "port": 0, "stop_timeout_s": 20, **usual, **values}
    settings = UpSettings.build(**given)
    site = make_site(settings, given)
    placer = Placer(settings, this_node())
    baton = BatonOnRay(settings, f"http://{settings.host}:{site.port}", placer)
    ground = ray_ground(settings, placer, local=False)

    def started(supervisor: Supervisor) -> None:
        baton.supervisor = supervisor

    running = asyncio.create_task(run(settings, site, ground, baton.say, started))
    try:
        await baton.wait_workers(*_workers(settings))
        yield baton
    finally:
        baton.supervisor.stop()
        async with asyncio.timeout(60):
            assert await running is None


def _workers(settings: UpSettings) -> list[str]:
    prefills = [f"prefill-{n}" for n in range(settings.prefill)]
    return [*prefills, *(f"decode-{n}" for n in range(settings.decode))]
