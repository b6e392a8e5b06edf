"""Sends a plan: closed loop (so many at once) or open loop (each at its time), within bounds."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import aiohttp

from baton.loadgen.client import Outcome, Target, send
from baton.loadgen.workload import PlannedRequest

OnOutcome = Callable[[Outcome], None]


@dataclass(frozen=True)
class Load:
    """`concurrency` bounds the requests in flight; a closed loop keeps exactly so many."""

    closed: bool
    concurrency: int
    timeout_s: float = 600.0


async def run(
    target: Target, requests: Sequence[PlannedRequest], load: Load, on_outcome: OnOutcome
) -> float:
    """Sends all; seconds from the first request to the end of the last."""
    connector = aiohttp.TCPConnector(limit=0, force_close=False, enable_cleanup_closed=False)
    timeout = aiohttp.ClientTimeout(total=load.timeout_s, sock_connect=30)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, trust_env=False, read_bufsize=1 << 20
    ) as session:
        started = time.perf_counter()
        sending = _Sending(session, target, started, on_outcome)
        if load.closed:
            await _closed(sending, iter(requests), load.concurrency)
        else:
            await _open(sending, requests, load.concurrency)
        return time.perf_counter() - started


class _Sending:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        target: Target,
        started: float,
        on_outcome: OnOutcome,
    ) -> None:
        self._session = session
        self._target = target
        self.started = started
        self._on_outcome = on_outcome

    async def one(self, request: PlannedRequest) -> None:
        self._on_outcome(await send(self._session, self._target, request, self.started))


async def _closed(sending: _Sending, requests: Iterator[PlannedRequest], concurrency: int) -> None:
    async def follow() -> None:
        for request in requests:  # shared: each request is taken once
            await sending.one(request)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(follow())


async def _open(sending: _Sending, requests: Sequence[PlannedRequest], concurrency: int) -> None:
    room = asyncio.Semaphore(concurrency)

    async def one(request: PlannedRequest) -> None:
        try:
            await sending.one(request)
        finally:
            room.release()

    async with asyncio.TaskGroup() as group:
        for request in requests:
            due = sending.started + request.at_s - time.perf_counter()
            if due > 0:
                await asyncio.sleep(due)
            await room.acquire()
            group.create_task(one(request))


async def first_model(url: str, headers: dict[str, str]) -> str | None:
    """The first model that the server lists; None when it does not say."""
    timeout = aiohttp.ClientTimeout(total=10)
    with suppress(aiohttp.ClientError, TimeoutError, ValueError, KeyError, IndexError, TypeError):
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{url}/v1/models", headers=headers) as response,
        ):
            return str((await response.json())["data"][0]["id"])
    return None
