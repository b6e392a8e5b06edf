"""Who shares a torch group, and whom its end concerns. The groups are made of nothing."""

import asyncio
from typing import Any

import pytest

from baton.engine.transfer.base import HandoffRefused, TransportFailed
from baton.v1 import common_pb2
from prefill_service.torch_pair import TorchPair

RESERVATION = common_pb2.Reservation()


class Group:
    backend = "gloo"
    depth = 1

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    def close(self) -> None:
        self.ended.set()


class Scripted(TorchPair):
    """Decode joins while `decode_answers` is set, and not for reservations that are `unknown`."""

    def __init__(self) -> None:
        super().__init__(lambda: None, "host:1", ["gloo"], "cpu", 30.0)  # type: ignore[arg-type, return-value]
        self.decode_answers = asyncio.Event()
        self.decode_answers.set()
        self.unknown: set[str] = set()
        self.asked: list[str] = []

    async def _live(
        self, reservation: common_pb2.Reservation, opened: "asyncio.Future[Any]"
    ) -> None:
        self.asked.append(reservation.id)
        await self.decode_answers.wait()
        if reservation.id in self.unknown:
            opened.set_exception(HandoffRefused(reservation.id))
            return
        group = Group()
        try:
            opened.set_result(group)
            await group.ended.wait()
        finally:
            group.close()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
async def pair() -> Scripted:
    return Scripted()


async def test_a_failed_link_ends_its_group_and_the_next_has_another(pair: Scripted) -> None:
    link = await pair.link(RESERVATION)
    assert (await pair.link(RESERVATION)).uses(pair.group)
    old = pair.group
    pair.failed(link)
    assert not (await pair.link(RESERVATION)).uses(old)
    assert old is not None and old.ended.is_set()


async def test_a_late_failure_of_an_old_group_leaves_its_successor_alone(pair: Scripted) -> None:
    """It closed whichever group there was."""
    late, abandoned = await pair.link(RESERVATION), await pair.link(RESERVATION)
    assert pair.group is not None
    pair.group.close()
    await pair.link(RESERVATION)
    successor = pair.group
    pair.failed(late)
    pair.abandoned(abandoned)
    await settle()
    assert (await pair.link(RESERVATION)).uses(successor)
    assert successor is not None and not successor.ended.is_set()


async def test_a_late_failure_does_not_cancel_whoever_waits_for_the_next_group(
    pair: Scripted,
) -> None:
    """A hand-off that waited for it got a CancelledError that nobody had asked for."""
    late = await pair.link(RESERVATION)
    assert pair.group is not None
    pair.group.close()
    pair.decode_answers.clear()
    waiting = asyncio.create_task(pair.link(RESERVATION))
    await settle()
    pair.failed(late)
    await settle()
    pair.decode_answers.set()
    assert (await waiting).uses(pair.group)


async def test_who_waits_for_a_group_of_a_pair_that_is_closed_learns_that_it_failed(
    pair: Scripted,
) -> None:
    pair.decode_answers.clear()
    waiting = [asyncio.create_task(pair.link(RESERVATION)) for _ in range(2)]
    await settle()
    pair.close()
    for one in waiting:
        with pytest.raises(TransportFailed, match="closed"):
            await one
    pair.decode_answers.set()
    assert (await pair.link(RESERVATION)).uses(pair.group)


async def test_a_hand_off_that_is_cancelled_leaves_the_joining_to_the_others(
    pair: Scripted,
) -> None:
    pair.decode_answers.clear()
    first, second = (asyncio.create_task(pair.link(RESERVATION)) for _ in range(2))
    await settle()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    pair.decode_answers.set()
    assert (await second).uses(pair.group)


async def test_each_who_waits_proves_itself_when_the_one_before_was_refused(
    pair: Scripted,
) -> None:
    """All were refused with the first."""
    pair.decode_answers.clear()
    pair.unknown = {"a", "b"}
    waiting = [asyncio.create_task(pair.link(common_pb2.Reservation(id=name))) for name in "abcd"]
    await settle()
    pair.decode_answers.set()
    *refused, third, fourth = await asyncio.gather(*waiting, return_exceptions=True)
    assert [str(error) for error in refused] == ["a", "b"]
    assert third.uses(pair.group) and fourth.uses(pair.group)
    assert pair.asked == ["a", "b", "c"]
