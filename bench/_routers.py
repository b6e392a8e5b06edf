"""Whether routers behind one port serve more than one does, on a machine of few cores.

Clients and workers need cores of their own to keep several routers busy. So each router has a
quarter of a core: it runs for 5 ms and is stopped for 15, and others have their turn meanwhile.
"""

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import Iterator
from typing import Any

import psutil
from _common import Report
from _gateway import (
    START_TIMEOUT_S,
    free_port,
    process,
    router_flags,
    send,
    stub_cluster,
    until_ready,
)

CLIENTS = 24
"""Of each router."""
MOST = 3
QUARTERS = 4
TURN_S = 0.005
WARM_UP, DEADLINE_S = 100, 120.0
SETTLE_S = 3.0
"""Routers tell each other of themselves within that time."""


async def measure(report: Report, requests: int) -> None:
    """`requests` of each router."""
    async with stub_cluster() as (url, _, _):
        alone = 0.0
        for count in range(1, MOST + 1):
            rate = await _rate(url, count, requests)
            alone = alone or rate
            report.add(f"gateway.quarter_cores.{count}.req_s", rate, "requests/s")
        report.add(f"gateway.quarter_cores.{MOST}.growth", rate / alone, "x")


async def _rate(redis_url: str, count: int, requests: int) -> float:
    port = free_port()
    flags = [*router_flags(port, redis_url), *(["--reuse-port"] if count > 1 else [])]
    with contextlib.ExitStack() as stack:
        routers = [stack.enter_context(process("-m", "router", *flags)) for _ in range(count)]
        await until_ready(port)
        await asyncio.sleep(SETTLE_S)
        await send(port, WARM_UP * count, CLIENTS * count)
        with _in_turn([router.pid for router in routers]):
            start = time.perf_counter()
            async with asyncio.timeout(DEADLINE_S):
                await send(port, requests * count, CLIENTS * count)
            return requests * count / (time.perf_counter() - start)


@contextlib.contextmanager
def _in_turn(pids: list[int]) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    begun = context.Event()
    turns = context.Process(target=_give_turns, args=(pids, begun))
    turns.start()
    try:
        if not begun.wait(START_TIMEOUT_S):
            raise TimeoutError("nobody gives the routers their turns")
        yield
    finally:
        turns.kill()
        turns.join()
        for pid in pids:
            psutil.Process(pid).resume()


def _give_turns(pids: list[int], begun: Any) -> None:
    routers = [psutil.Process(pid) for pid in pids]
    for router in routers:
        router.suspend()
    begun.set()
    while True:
        for router in routers:
            router.resume()
            time.sleep(TURN_S)
            router.suspend()
        time.sleep(TURN_S * (QUARTERS - len(routers)))
