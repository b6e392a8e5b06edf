"""The queue in front of the workers is bounded, fair, and loses neither slots nor requests."""

import asyncio
from collections.abc import Awaitable

import pytest

from router.admission import Admission, QueueFull, QueueTimeout, Slot


def now() -> float:
    return asyncio.get_running_loop().time()


class Client:
    """One request that runs until told to end."""

    def __init__(self, admission: Admission, timeout_s: float = 30) -> None:
        self._admission = admission
        self._timeout_s = timeout_s
        self.entered = asyncio.Event()
        self.end = asyncio.Event()
        self.slot: Slot
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with self._admission.slot(now() + self._timeout_s) as self.slot:
            self.entered.set()
            await self.end.wait()

    async def finish(self) -> None:
        self.end.set()
        await self.task


async def soon(event: Awaitable[object]) -> None:
    async with asyncio.timeout(20):
        await event


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_requests_beyond_the_limit_wait_and_enter_in_order() -> None:
    admission = Admission(max_running=1, max_queue=10)
    clients = [Client(admission) for _ in range(3)]
    await settle()
    assert (admission.running, admission.waiting) == (1, 2)
    for i, client in enumerate(clients):
        assert client.entered.is_set()
        assert not any(later.entered.is_set() for later in clients[i + 1 :])
        await client.finish()
        await settle()
    assert (admission.running, admission.waiting) == (0, 0)


async def test_a_full_queue_refuses_at_once_with_retry_after() -> None:
    admission = Admission(max_running=1, max_queue=1)
    running, waiting = Client(admission), Client(admission)
    await settle()
    with pytest.raises(QueueFull) as caught:
        async with admission.slot(now() + 30):
            pass
    assert caught.value.retry_after_s == 1
    await running.finish()
    await waiting.finish()


async def test_a_wait_ends_at_its_deadline_and_leaves_nothing_behind() -> None:
    admission = Admission(max_running=1, max_queue=5)
    running, waiting = Client(admission), Client(admission, timeout_s=0.01)
    with pytest.raises(QueueTimeout):
        await waiting.task
    assert admission.waiting == 0
    await running.finish()
    assert admission.running == 0


async def test_a_client_that_leaves_while_queued_gives_up_its_place() -> None:
    admission = Admission(max_running=1, max_queue=5)
    first, second, third = (Client(admission) for _ in range(3))
    await settle()
    second.task.cancel()
    await settle()
    assert admission.waiting == 1
    await first.finish()
    async with asyncio.timeout(20):
        await third.entered.wait()
    await third.finish()
    assert admission.running == 0


async def test_a_slot_granted_in_the_moment_of_leaving_goes_to_the_next() -> None:
    admission = Admission(max_running=1, max_queue=5)
    first, second, third = (Client(admission) for _ in range(3))
    await settle()
    first.slot.leave()
    second.task.cancel()
    async with asyncio.timeout(20):
        await third.entered.wait()
    await third.finish()
    assert (admission.running, admission.waiting) == (0, 0)


async def test_a_refused_request_keeps_its_place_before_later_ones() -> None:
    admission = Admission(max_running=2, max_queue=5)
    first, second = Client(admission), Client(admission)
    await settle()
    third = Client(admission)
    back = asyncio.create_task(second.slot.refused())
    await settle()
    assert not third.entered.is_set()
    admission.workers_changed()
    async with asyncio.timeout(20):
        await back
    assert not third.entered.is_set()
    for client in (first, second, third):
        client.end.set()
    await asyncio.gather(first.task, second.task, third.task)
    assert admission.running == 0


async def test_one_that_had_its_turn_goes_back_although_a_newcomer_took_its_place() -> None:
    """The bound counted it as a newcomer: the oldest was refused for the youngest."""
    admission = Admission(max_running=1, max_queue=1)
    first, oldest = Client(admission), Client(admission)
    await settle()
    await first.finish()
    await soon(oldest.entered.wait())
    newcomer = Client(admission)
    await settle()
    back = asyncio.create_task(oldest.slot.refused())
    await settle()
    assert (admission.running, admission.waiting) == (0, 2)
    with pytest.raises(QueueFull):
        async with admission.slot(now() + 30):
            pass
    admission.workers_changed()
    await soon(back)
    assert not newcomer.entered.is_set()
    await oldest.finish()
    await newcomer.finish()


async def test_one_that_never_waited_is_a_newcomer_to_the_queue() -> None:
    admission = Admission(max_running=2, max_queue=1)
    first, second = Client(admission), Client(admission)
    await settle()
    waiting = Client(admission)
    await settle()
    with pytest.raises(QueueFull):
        await first.slot.refused()
    for client in (second, waiting):
        await client.finish()
    await first.finish()
    assert (admission.running, admission.waiting) == (0, 0)


async def test_an_answer_that_has_begun_waits_for_room_although_the_queue_is_full() -> None:
    admission = Admission(max_running=1, max_queue=1)
    begun = Client(admission)
    await settle()
    waiting = Client(admission)
    await settle()
    part = asyncio.create_task(begun.slot.refused(now() + 30))
    await settle()
    assert (admission.running, admission.waiting) == (0, 2)
    admission.workers_changed()
    await soon(part)
    await begun.finish()
    await waiting.finish()


async def test_newcomers_queue_behind_waiters_although_there_is_a_free_slot() -> None:
    admission = Admission(max_running=5, max_queue=5)
    first = Client(admission)
    await settle()
    back = asyncio.create_task(first.slot.refused())
    await settle()
    second = Client(admission)
    await settle()
    assert not second.entered.is_set()
    admission.workers_changed()
    await back
    first.slot.accepted()
    async with asyncio.timeout(20):
        await second.entered.wait()
    await first.finish()
    await second.finish()


async def test_parts_of_one_request_that_wait_together_hold_one_slot() -> None:
    """Choices of one request that were refused at the same time gave up its slot twice."""
    admission = Admission(max_running=2, max_queue=5)
    client = Client(admission)
    await settle()
    parts = [asyncio.create_task(client.slot.refused()) for _ in range(2)]
    await settle()
    assert (admission.running, admission.waiting) == (0, 2)
    admission.workers_changed()
    admission.workers_changed()
    for part in parts:
        await soon(part)
    assert admission.running == 1
    parts = [asyncio.create_task(client.slot.refused()) for _ in range(2)]
    await settle()
    for part in parts:
        part.cancel()
    await client.finish()
    assert (admission.running, admission.waiting) == (0, 0)
