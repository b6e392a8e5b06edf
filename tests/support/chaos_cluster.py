"""A cluster of real processes that tests kill, stop and cut off, and its state of rest.

Each worker reports at the fault points; each process may have a host of its own. The books of
a worker are what it says over gRPC; its descriptors are read from /proc.
"""

import asyncio
import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx

from baton.cluster.child import die_with_parent
from baton.cluster.redis_server import find_redis_server
from baton.v1 import worker_pb2, worker_pb2_grpc
from tests.support.answers import Answer, gather_events
from tests.support.fault_points import FaultPoints
from tests.support.fault_worker import NAME, SOCKET
from tests.support.hosts import Host, Network

COMPLETIONS = "/v1/completions"
START_TIMEOUT_S = 150.0
REST_TIMEOUT_S = 20.0
NUM_BLOCKS = 256


@dataclass
class Node:
    """One process and its life; a new one takes its place under the same name."""

    name: str
    host: Host
    port: int
    command: list[str]
    environment: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    stopped: bool = False
    cut_off: bool = False

    @property
    def role(self) -> str:
        return self.name.partition("-")[0]

    @property
    def address(self) -> str:
        return f"{self.host.address}:{self.port}"

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.host.prefix, *self.command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent(),
            )

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert self.process is not None
        self.process.wait(10)

    def stop(self) -> None:
        self.stopped = True
        os.kill(self.pid, signal.SIGSTOP)

    def cut(self) -> None:
        self.cut_off = True
        self.host.cut()

    def heal(self) -> None:
        if self.cut_off:
            self.host.heal()
        self.cut_off = False

    def restore(self) -> None:
        self.heal()
        if self.stopped:
            os.kill(self.pid, signal.SIGCONT)
        self.stopped = False
        if not self.alive:
            self.start()

    def end(self) -> None:
        if self.alive:
            self.kill()

    def segments(self) -> set[str]:
        """Shared memory it has open or mapped, its own and that of others."""
        found = set()
        for fd in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(fd)
                if "memfd:" in target or "/dev/shm/" in target:
                    found.add(f"{target}#{fd.stat().st_ino}")
        maps = Path(f"/proc/{self.pid}/maps").read_text()
        found.update(f"map#{inode}" for inode in re.findall(r" (\d+) +/memfd:baton", maps))
        return found


@dataclass
class ChaosCluster:
    """`ask` is a client; `assert_at_rest` says what a survivor still holds."""

    faults: FaultPoints
    transport: str = ""
    nodes: dict[str, Node] = field(default_factory=dict)

    # --- requests -----------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://{self.nodes['router-0'].address}"

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self.url, timeout=60, limits=limits) as client:
            yield client

    async def ask(self, **body: Any) -> Answer:
        """A streamed answer, read to its end. Its cache is its own: every hand-off is whole."""
        body = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": 0, **body}
        body.setdefault("cache_salt", secrets.token_hex(8))
        async with (
            self.client() as client,
            client.stream("POST", COMPLETIONS, json=body) as response,
        ):
            assert response.status_code == 200, await response.aread()
            return await gather_events(response)

    # --- processes ----------------------------------------------------------------------------

    @property
    def workers(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.role != "router"]

    def busy(self, role: str) -> Node:
        """The one that the request in flight is at."""
        if role == "router":
            return self.nodes["router-0"]
        point = {"prefill": "prefill.frame", "decode": "decode.reserve"}[role]
        return self.nodes[self.faults.last[point]]

    async def retries(self) -> float:
        """Attempts of requests after the first, since the router began."""
        async with self.client() as client:
            lines = (await client.get("/metrics")).text.splitlines()
        counts = [line for line in lines if line.startswith("baton_retries_total{")]
        return sum(float(line.split()[-1]) for line in counts)

    async def transport_used(self) -> str:
        """By the last hand-off."""
        links = (await info(self.busy("prefill"))).links
        return next(link.transport for link in links if link.peer == self.busy("decode").address)

    async def restore(self) -> None:
        """All processes live, know each other and are at rest."""
        self.faults.disarm()
        for node in self.nodes.values():
            node.restore()
        await self.wait_ready()
        await self.wait_at_rest()

    async def wait_ready(self) -> None:
        await _until(self._assert_ready, START_TIMEOUT_S)

    async def _assert_ready(self) -> None:
        for node in self.nodes.values():
            if not node.alive:
                raise RuntimeError(f"{node.name} has ended: {node.log.read_text()[-2000:]}")
        async with self.client() as client:
            records = (await client.get("/workers", timeout=2)).json()["workers"]
            assert (await client.get("/health/ready", timeout=2)).status_code == 200
        known = {record["worker_id"]: record["incarnation"] for record in records}
        for node in self.workers:
            assert (await info(node)).incarnation == known.get(node.name)

    async def known(self) -> set[str]:
        """The workers that the router would use."""
        async with self.client() as client:
            records = (await client.get("/workers")).json()["workers"]
        return {record["worker_id"] for record in records}

    # --- rest ---------------------------------------------------------------------------------

    async def wait_at_rest(self, timeout_s: float = REST_TIMEOUT_S) -> None:
        await _until(self.assert_at_rest, timeout_s)

    async def assert_at_rest(self) -> None:
        """No survivor holds a block, a promise, a sequence or a hand-off; no shared memory of
        the dead is left."""
        living = [node for node in self.workers if node.alive and not node.stopped]
        own = set[str]()
        for node in living:
            own |= {name.rpartition("#")[2] for name in node.segments() if "memfd:" in name}
        for node in living:
            mapped = {name.removeprefix("map#") for name in node.segments() if "map#" in name}
            stopped = any(other.stopped for other in self.workers)
            assert stopped or mapped <= own, f"{node.name} maps memory of the dead"
            if node.cut_off:
                continue
            load = (await info(node)).load
            held = {name: getattr(load, name) for name in HELD}
            assert not any(held.values()), f"{node.name}: {held}"
            assert load.free_blocks == NUM_BLOCKS, f"{node.name}: {load.free_blocks} are free"


HELD = ("waiting", "running", "handoffs_in_flight", "promised_blocks")


async def info(node: Node) -> worker_pb2.WorkerInfo:
    async with grpc.aio.insecure_channel(node.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        return await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=2)


async def _until(check: Callable[[], Awaitable[None]], timeout_s: float) -> None:
    """The last failure of `check` when it does not pass in time."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        try:
            return await check()
        except (AssertionError, httpx.HTTPError, grpc.aio.AioRpcError):
            if loop.time() > deadline:
                raise
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def chaos_cluster(
    model: Path,
    folder: Path,
    network: Network,
    prefills: int = 2,
    decodes: int = 2,
    **settings: dict[str, Any],
) -> AsyncIterator[ChaosCluster]:
    """Ready. Nothing of it is left afterwards. `settings`: of "workers" or of one role or name."""
    cluster = ChaosCluster(FaultPoints(folder))
    await cluster.faults.start()
    redis, url = _start_redis(network, folder)
    common = {"redis_url": url, "model": model}
    every = {"dtype": "float32", "num_blocks": NUM_BLOCKS, "chunk_size": 64, "threads": 1}
    every |= {"self_profile": False}
    every |= settings.get("workers", {})
    names = [f"prefill-{i}" for i in range(prefills)] + [f"decode-{i}" for i in range(decodes)]
    try:
        for name in [*names, "router-0"]:
            role = name.partition("-")[0]
            own = settings.get(role, {}) | settings.get(name.replace("-", "_"), {})
            if role == "router":
                # Every request is handed off: that is what the faults are about.
                module, values = ["router"], common | {"decode_prefills": "never"} | own
            else:
                module = ["tests.support.fault_worker", role]
                values = common | every | {"worker_id": name} | own
            cluster.nodes[name] = _node(name, network, module, values, cluster.faults, folder)
        for node in cluster.nodes.values():
            node.start()
        await cluster.wait_ready()
        yield cluster
    finally:
        for node in cluster.nodes.values():
            node.end()
        redis.kill()
        redis.wait()
        await cluster.faults.stop()


def _node(
    name: str,
    network: Network,
    module: list[str],
    values: dict[str, Any],
    faults: FaultPoints,
    folder: Path,
) -> Node:
    host = network.host()
    port = 7000 if network.apart else _free_port(host.address)
    flags = [_flag(key, value) for key, value in values.items() if key != "redis_url"]
    flags += [f"--redis={values['redis_url']}", f"--host={host.address}", f"--port={port}"]
    environment = {**os.environ, SOCKET: str(faults.path), NAME: name, "BATON_HOME": str(folder)}
    command = [sys.executable, "-m", *module, *flags]
    return Node(name, host, port, command, environment, folder / f"{name}.log")


def _flag(key: str, value: object) -> str:
    name = key.replace("_", "-")
    return f"--{name}={value}" if value is not False else f"--no-{name}"


def _start_redis(network: Network, folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    port = _free_port(network.address)
    flags = ["--bind", network.address, "--port", str(port), "--dir", str(folder)]
    process = subprocess.Popen(
        [find_redis_server(), *flags, "--save", "", "--protected-mode", "no"],
        stdout=subprocess.DEVNULL,
        preexec_fn=die_with_parent(),
    )
    return process, f"redis://{network.address}:{port}/0"


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
