"""A real Redis for tests, and workers to put into it."""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from baton.cluster.workers import KVLayout, Role, WorkerLoad, WorkerRecord, new_incarnation
from baton.step_totals import StepTotals

T = TypeVar("T")
LAYOUT = KVLayout("f" * 16, 2, 1, 8, 16, "float32")


def make_record(
    worker_id: str = "decode-0", incarnation: str | None = None, **load: object
) -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id,
        incarnation=incarnation or new_incarnation(),
        role=Role(worker_id.split("-")[0]),
        address="127.0.0.1:50051",
        model="toy",
        layout=LAYOUT,
        max_model_len=128,
        max_num_seqs=8,
        num_blocks=64,
        load=dataclasses.replace(WorkerLoad(free_blocks=64), **load),
        profile=(StepTotals(1, 16, 136, 0, 0, 0.01),),
    )


async def eventually(condition: Callable[[], bool], timeout_s: float = 20.0) -> float:
    """Waits until the condition holds; the seconds that took. Fails after the deadline."""
    started = time.monotonic()
    while not condition():
        waited = time.monotonic() - started
        if waited > timeout_s:
            raise TimeoutError(f"not within {timeout_s} s")
        await asyncio.sleep(0.02)
    return time.monotonic() - started


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 15.0) -> None:
    """As `eventually`, for a condition that has to ask somebody."""
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110 (what is asked tells nobody)
            await asyncio.sleep(0.02)


async def until_equal(read: Callable[[], Awaitable[object]], wanted: object) -> None:
    """Until what is read is what is wanted; else fails with what it was at last."""
    found: object = None

    async def equal() -> bool:
        nonlocal found
        found = await read()
        return found == wanted

    try:
        await until(equal)
    except TimeoutError:
        raise AssertionError(f"{found} instead of {wanted}") from None


async def within(timeout_s: float, awaited: Awaitable[T]) -> T:
    """The result, or TimeoutError after the deadline."""
    async with asyncio.timeout(timeout_s):
        return await awaited
