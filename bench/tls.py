"""What mutual TLS costs: bytes through one gRPC stream, a small call, a handshake.

In clear and with it, in turn. The server is a process of its own, as a decode worker is.
"""

import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
from _common import Report, parser
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.cluster.rpc import ChannelPool, make_server
from baton.cluster.tls import TlsFolder
from baton.cluster.tls.keeper import Keeper

MESSAGE = 1 << 20
NAMES = ("clear", "tls")


def _add_sink(server: grpc.aio.Server) -> None:
    async def push(messages: AsyncIterator[bytes], context: Any) -> bytes:
        return str(sum([len(message) async for message in messages])).encode()

    handlers = {"Push": grpc.stream_unary_rpc_method_handler(push)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("sink", handlers),))


def _serve(connection: Any, folder: Path) -> None:
    async def run() -> None:
        addresses, servers = [], []
        for tls in (None, TlsFolder(folder / "decode")):
            server, port = await make_server([_add_sink], "127.0.0.1:0", [], tls=tls)
            await server.start()
            servers.append(server)
            addresses.append(f"127.0.0.1:{port}")
        connection.send(addresses)
        await asyncio.to_thread(connection.recv)

    asyncio.run(run())


@contextmanager
def _peer(folder: Path) -> Iterator[dict[str, str]]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, folder), daemon=True)
    process.start()
    try:
        yield dict(zip(NAMES, mine.recv(), strict=True))
    finally:
        process.kill()
        process.join()


async def _bulk_s(channel: grpc.aio.Channel, mib: int) -> float:
    message, call = bytes(MESSAGE), channel.stream_unary("/sink/Push")()
    start = time.perf_counter()
    for _ in range(mib):
        await call.write(message)
    await call.done_writing()
    assert int(await call) == mib * MESSAGE
    return time.perf_counter() - start


async def _call_s(channel: grpc.aio.Channel) -> float:
    stub = health_pb2_grpc.HealthStub(channel)
    start = time.perf_counter()
    for _ in range(100):
        await stub.Check(health_pb2.HealthCheckRequest())
    return (time.perf_counter() - start) / 100


async def _first_call_s(folder: TlsFolder | None, address: str) -> float:
    """On a new connection."""
    pool = ChannelPool(tls=folder)
    start = time.perf_counter()
    await health_pb2_grpc.HealthStub(pool.get(address)).Check(health_pb2.HealthCheckRequest())
    spent = time.perf_counter() - start
    await pool.close()
    return spent


async def _measure(addresses: dict[str, str], folder: Path, quick: bool, report: Report) -> None:
    tls = {"clear": None, "tls": TlsFolder(folder / "router")}
    pools = {name: ChannelPool(tls=tls[name]) for name in NAMES}
    mib, rounds = (64, 3) if quick else (256, 9)
    runs = {
        "bulk": lambda name: _bulk_s(pools[name].get(addresses[name]), mib),
        "call": lambda name: _call_s(pools[name].get(addresses[name])),
        "first_call": lambda name: _first_call_s(tls[name], addresses[name]),
    }
    for what, run in runs.items():
        seconds: dict[str, list[float]] = {name: [] for name in NAMES}
        for number in range(rounds + 1):
            for name in NAMES:
                spent = await run(name)
                if number:  # the first round warms
                    seconds[name].append(spent)
        median = {name: statistics.median(seconds[name]) for name in NAMES}
        for name in NAMES:
            if what == "bulk":
                report.add(f"bulk.{name}", mib * MESSAGE / 1e9 / median[name], "GB/s")
            else:
                report.add(f"{what}.{name}", median[name] * 1e6, "us")
        report.add_ratio(f"{what}.tls_vs_clear", median["tls"], median["clear"])
    for pool in pools.values():
        await pool.close()


def main() -> None:
    args = parser(__doc__ or "").parse_args()
    report = Report("Mutual TLS against clear, loopback")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Keeper(folder / "ca", folder, ("127.0.0.1",)).renew()
        with _peer(folder) as addresses:
            measure = partial(_measure, addresses, folder, args.quick, report)
            asyncio.run(measure())
    report.finish(args.json)


if __name__ == "__main__":
    main()
