"""Real Redis servers of every kind, as child processes that end with the test."""

import asyncio
import contextlib
import os
import re
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import trustme
from redis.asyncio import Redis

from baton.cluster.child import die_with_parent
from baton.cluster.redis_server import find_redis_server
from tests.support.redis import until

START_TIMEOUT_S = 15.0


def _major_version() -> int:
    answer = subprocess.run([find_redis_server(), "--version"], capture_output=True, text=True)
    found = re.search(r"v=(\d+)", answer.stdout)
    assert found, answer
    return int(found[1])


redis_7 = pytest.mark.skipif(
    _major_version() < 7,
    reason="the Redis that comes with Baton is older and has no TLS; install redis-server 7",
)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def redis_process(
    folder: Path, *flags: str, ready: str = "eady to accept connections"
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A redis-server with these flags, once it says that it is ready. Raises RuntimeError with
    its last line when it ends instead."""
    os.makedirs(folder, exist_ok=True)
    process = await asyncio.create_subprocess_exec(
        find_redis_server(),
        *flags,
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        preexec_fn=die_with_parent(),
    )
    assert process.stdout is not None
    line = b""
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while ready.encode() not in line:
                last, line = line, await process.stdout.readline()
                if not line:
                    raise RuntimeError(last.decode())
        drained = asyncio.create_task(process.stdout.read())
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    await drained


def plain_flags(port: int, *more: str) -> list[str]:
    return ["--bind", "127.0.0.1", "--port", str(port), "--save", "", *more]


@contextlib.asynccontextmanager
async def tls_redis(
    folder: Path, user: str, password: str, acl: Sequence[str] = ()
) -> AsyncIterator[str]:
    """The URL of a server that speaks TLS only. `acl`: its users, by default this one alone."""
    authority, port = trustme.CA(), free_port()
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    os.makedirs(folder, exist_ok=True)
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
    for blob in certificate.cert_chain_pems:
        blob.write_to_path(str(folder / "cert.pem"), append=True)
    flags = ["--bind", "127.0.0.1", "--port", "0", "--tls-port", str(port), "--save", ""]
    flags += ["--tls-cert-file", "cert.pem", "--tls-key-file", "key.pem"]
    flags += ["--tls-ca-cert-file", "ca.pem", "--tls-auth-clients", "no"]
    flags += ["--aclfile", "users.acl"]
    users = acl or [f"user {user} on ~{{baton}}* &{{baton}}* +@all >{password}"]
    (folder / "users.acl").write_text("\n".join(["user default off", *users, ""]))
    async with redis_process(folder, *flags):
        yield f"rediss://{user}:{password}@127.0.0.1:{port}/0?ssl_ca_certs={folder}/ca.pem"


@contextlib.asynccontextmanager
async def redis_cluster(folder: Path, nodes: int = 3) -> AsyncIterator[str]:
    """The URL of a Redis Cluster whose slots are shared out evenly."""
    ports, buses = ([free_port() for _ in range(nodes)] for _ in range(2))
    async with contextlib.AsyncExitStack() as stack:
        for port, bus in zip(ports, buses, strict=True):
            flags = plain_flags(port, "--cluster-enabled", "yes", "--cluster-port", str(bus))
            await stack.enter_async_context(redis_process(folder / str(port), *flags))
        clients = [await stack.enter_async_context(Redis(port=port)) for port in ports]
        bounds = [16384 * index // nodes for index in range(nodes + 1)]
        for client, low, high in zip(clients, bounds, bounds[1:], strict=False):
            await client.execute_command("CLUSTER ADDSLOTSRANGE", low, high - 1)
        await _meet(clients, ports[0], buses[0])
        yield "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in ports)


async def _meet(clients: Sequence[Redis], port: int, bus: int) -> None:
    for client in clients[1:]:
        await client.execute_command("CLUSTER MEET", "127.0.0.1", port, bus)

    async def joined(client: Redis) -> bool:
        return (await client.execute_command("CLUSTER INFO"))["cluster_state"] == "ok"

    for client in clients:
        await until(partial(joined, client))


@contextlib.asynccontextmanager
async def sentinel_pair(
    folder: Path, service: str
) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """A master with a replica under one Sentinel: the URL, and the first master."""
    master, replica, sentinel = free_port(), free_port(), free_port()
    async with contextlib.AsyncExitStack() as stack:
        flags = plain_flags(master, "--repl-diskless-sync-delay", "0")
        first = await stack.enter_async_context(redis_process(folder / "master", *flags))
        flags = plain_flags(replica, "--replicaof", f"127.0.0.1 {master}")
        await stack.enter_async_context(redis_process(folder / "replica", *flags))
        config = folder / "sentinel.conf"
        config.write_text(
            f"port {sentinel}\nbind 127.0.0.1\n"
            f"sentinel monitor {service} 127.0.0.1 {master} 1\n"
            f"sentinel down-after-milliseconds {service} 500\n"
            f"sentinel failover-timeout {service} 3000\n"
        )
        flags = [str(config), "--sentinel"]
        await stack.enter_async_context(redis_process(folder, *flags, ready="+monitor master"))
        async with Redis(port=replica) as client:
            await until(partial(_follows, client))
        yield f"redis+sentinel://127.0.0.1:{sentinel}/{service}/0", first


async def _follows(replica: Redis) -> bool:
    return (await replica.info("replication"))["master_link_status"] == "up"
