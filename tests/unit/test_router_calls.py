"""Whom a call blames for silence."""

import asyncio
import time
from typing import Any

import pytest

from baton.cluster.ledger import CallTrail
from baton.cluster.once import Once
from baton.cluster.workers import Role
from baton.v1 import decode_pb2
from router.calls import WorkerCall, WorkerFault
from tests.support.candidates import record

PATIENCE_S = 0.2
HANG_S = 20.0


class Call:
    """Its only event comes when `answer` is called."""

    def __init__(self) -> None:
        self._event: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def answer(self) -> None:
        event = decode_pb2.GenerateEvent(reserved=decode_pb2.Reserved())
        self._event.set_result((event, event.SerializeToString()))

    async def read(self) -> Any:
        return await self._event


def worker_call(call: Call) -> WorkerCall:
    trail = CallTrail("decode-0", Role.DECODE, time.monotonic(), 1)
    worker = record(Role.DECODE, "decode-0")
    return WorkerCall(worker, call, trail, lambda kind, event: None, Once())


async def test_an_answer_that_waits_while_the_router_is_busy_is_no_silence() -> None:
    """An overloaded router once took all its workers for lost."""
    call, loop = Call(), asyncio.get_running_loop()

    def busy() -> None:
        time.sleep(2 * PATIENCE_S)
        loop.call_soon(call.answer)  # what has come is read a turn later

    async with asyncio.timeout(HANG_S):
        loop.call_soon(busy)
        event = await worker_call(call).read_within(PATIENCE_S)
    assert event.HasField("reserved")


async def test_a_worker_that_says_nothing_counts_as_unreachable() -> None:
    async with asyncio.timeout(HANG_S):
        with pytest.raises(WorkerFault) as silence:
            await worker_call(Call()).read_within(PATIENCE_S)
    assert silence.value.unreachable and "0.2 s" in silence.value.reason
