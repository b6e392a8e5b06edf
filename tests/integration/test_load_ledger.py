"""The load of all routers on a real Redis: seen by each other, no herd, gone with its router."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from redis.asyncio import Redis

from baton.cluster.load_ledger import NOTHING, Load, LoadLedger
from baton.cluster.redis_link import RedisLink
from baton.cluster.redis_server import EmbeddedRedis
from tests.support.redis import eventually

ONE = Load(1, 100)
Start = Callable[[], Awaitable[LoadLedger]]


@pytest.fixture
async def start(redis_server: tuple[EmbeddedRedis, str]) -> AsyncIterator[Start]:
    started: list[tuple[LoadLedger, RedisLink]] = []

    async def make() -> LoadLedger:
        link = RedisLink(redis_server[1])
        ledger = LoadLedger(link, confirm_timeout_s=5.0)
        await ledger.start()
        started.append((ledger, link))
        for known, _ in started:
            await eventually(lambda known=known: known.num_others == len(started) - 1)  # type: ignore[misc]
        return ledger

    yield make
    for ledger, link in started:
        await ledger.stop()
        await link.close()


async def test_a_router_sees_what_the_others_gave_and_took_back(start: Start) -> None:
    ours, theirs = await start(), await start()
    theirs.add({"decode-0": Load(2, 500), "decode-0/prefill": ONE})
    await eventually(lambda: ours.load("decode-0") == Load(2, 500))
    assert ours.load("decode-0/prefill") == ONE
    ours.add({"decode-0": ONE})
    assert ours.load("decode-0") == Load(3, 600)
    theirs.remove({"decode-0": Load(2, 500)})
    await eventually(lambda: ours.load("decode-0") == ONE)


async def test_the_later_of_two_routers_that_choose_one_worker_chooses_again(
    start: Start,
) -> None:
    routers = [await start(), await start()]
    for router in routers:
        router.add({"decode-0": ONE})  # both saw an idle worker
    confirmed = await asyncio.gather(*(router.confirm(["decode-0"]) for router in routers))
    assert sorted(confirmed) == [False, True]
    later = routers[confirmed.index(False)]
    later.remove({"decode-0": ONE})
    assert later.load("decode-0") == ONE  # and now it knows
    later.add({"decode-1": ONE})
    assert await later.confirm(["decode-1"])


async def test_a_router_alone_asks_nobody_and_asks_when_another_one_comes(start: Start) -> None:
    def asks(ledger: LoadLedger) -> bool:
        """Whether it waits for an answer."""
        asking = ledger.confirm(["decode-0"])
        try:
            asking.send(None)
        except StopIteration as told:
            assert told.value is True
            return False
        asking.close()
        return True

    ours = await start()
    await eventually(lambda: not asks(ours))
    theirs = await start()
    assert asks(ours) and asks(theirs)
    await theirs.stop()
    await eventually(lambda: not asks(ours))


async def test_routers_that_choose_at_once_do_not_herd(start: Start) -> None:
    """vLLM router #177: loads were stale when decisions were made, so all chose the same worker."""
    routers = [await start() for _ in range(4)]
    names, chosen = [f"decode-{index}" for index in range(8)], Counter[str]()

    async def place(router: LoadLedger) -> None:
        for last in (False, False, False, True):
            name = min(names, key=lambda name: (router.load(name).requests, name))
            router.add({name: ONE})
            if await router.confirm([name]) or last:
                chosen[name] += 1
                return
            router.remove({name: ONE})

    await asyncio.gather(*(place(router) for _ in range(8) for router in routers))
    assert sum(chosen.values()) == 32
    assert max(chosen.values()) - min(chosen.get(name, 0) for name in names) <= 3, chosen


async def test_the_load_of_a_dead_router_is_forgotten(start: Start) -> None:
    ours, theirs = await start(), await start()
    theirs.add({"decode-0": ONE})
    await eventually(lambda: ours.load("decode-0") == ONE)
    assert theirs._task is not None
    theirs._task.cancel()  # it dies without a word
    await eventually(lambda: ours.load("decode-0") == NOTHING)


async def test_a_router_that_stops_takes_its_load_back_at_once(
    start: Start, redis_server: tuple[EmbeddedRedis, str]
) -> None:
    ours, theirs = await start(), await start()
    theirs.add({"decode-0": ONE})
    await eventually(lambda: ours.load("decode-0") == ONE)
    await theirs.stop()
    async with Redis.from_url(redis_server[1]) as client:
        assert not await client.exists(f"{{baton}}:load:{theirs.router_id}")


async def test_an_emptied_redis_learns_the_loads_again(
    start: Start, redis_server: tuple[EmbeddedRedis, str]
) -> None:
    ours, theirs = await start(), await start()
    theirs.add({"decode-0": ONE})
    await eventually(lambda: ours.load("decode-0") == ONE)
    async with Redis.from_url(redis_server[1]) as client:
        await client.flushall()
    theirs.add({"decode-1": ONE})
    await eventually(lambda: ours.load("decode-1") == ONE)
    assert ours.load("decode-0") == ONE


async def test_without_redis_a_router_goes_on_with_its_own_counts(
    start: Start, redis_server: tuple[EmbeddedRedis, str]
) -> None:
    ours, theirs = await start(), await start()
    theirs.add({"decode-0": ONE})
    await eventually(lambda: ours.load("decode-0") == ONE)
    os.kill(redis_server[0].pid or 0, signal.SIGSTOP)
    ours.add({"decode-0": ONE})
    for _ in range(50):
        assert await ours.confirm(["decode-0"])
    await eventually(lambda: ours.load("decode-0") == ONE)  # others' leases are over by now
    os.kill(redis_server[0].pid or 0, signal.SIGCONT)
    await eventually(lambda: ours.load("decode-0") == Load(2, 200))


async def test_a_ledger_without_redis_counts_all_the_same() -> None:
    ledger = LoadLedger()
    await ledger.start()
    ledger.add({"decode-0": ONE})
    assert await ledger.confirm(["decode-0"])
    assert ledger.load("decode-0") == ONE
    ledger.remove({"decode-0": ONE})
    assert ledger.load("decode-0") == NOTHING
    await ledger.stop()
