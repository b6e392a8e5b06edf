"""Limits of API keys on a real Redis: one count for all routers, and each its own without Redis."""

import time
from collections.abc import AsyncIterator, Callable

import pytest

from baton.cluster.redis_link import RedisLink
from baton.cluster.redis_server import EmbeddedRedis
from router.access import Caller, KeyRing, SharedLimits
from router.access.keys import ApiKey, hash_of, new_key
from router.openai.errors import ApiError
from tests.support.redis import until

KEY = new_key()
Start = Callable[..., Caller]


@pytest.fixture
async def start(redis_server: tuple[EmbeddedRedis, str]) -> AsyncIterator[Start]:
    """The key's caller at a router of its own."""
    links: list[RedisLink] = []

    def make(**limits: int) -> Caller:
        links.append(RedisLink(redis_server[1]))
        entry = ApiKey(name="a", sha256=hash_of(KEY), **limits)  # type: ignore[arg-type]
        shared = SharedLimits(links[-1], take_timeout_s=5.0)
        return KeyRing(entry.line(), shared=shared).caller(f"Bearer {KEY}")

    yield make
    for link in links:
        await link.close()


async def request(caller: Caller) -> float:
    """0, or the seconds to wait."""
    try:
        await caller.count_request(time.monotonic())
    except ApiError as error:
        assert error.status == 429 and error.retry_after_s is not None
        return error.retry_after_s
    return 0


async def test_a_key_has_its_limit_once_at_however_many_routers(start: Start) -> None:
    """It had it once at each."""
    routers = [start(requests_per_minute=3) for _ in range(2)]
    assert [await request(routers[i % 2]) for i in range(3)] == [0, 0, 0]
    for router in routers:
        assert 0 < await request(router) <= 20


async def test_what_is_generated_at_one_router_is_paid_for_at_every_one(start: Start) -> None:
    ours, theirs = start(tokens_per_minute=600), start(tokens_per_minute=600)
    await ours.count_prompt(600, time.monotonic())
    ours.count_output(300, time.monotonic())

    async def owes_both() -> bool:
        with pytest.raises(ApiError) as refused:
            await theirs.count_prompt(1, time.monotonic())
        return (refused.value.retry_after_s or 0) > 1

    await until(owes_both)


async def test_what_is_given_back_at_one_router_is_there_at_every_one(start: Start) -> None:
    ours, theirs = start(tokens_per_minute=60), start(tokens_per_minute=60)

    async def takes_all() -> bool:
        try:
            await theirs.count_prompt(60, time.monotonic())
        except ApiError:
            return False
        return True

    await ours.count_prompt(60, time.monotonic())
    for given_back in (60, 6000):  # it never holds more than a minute's worth
        assert not await takes_all()
        ours.return_prompt(given_back, time.monotonic())
        await until(takes_all)
    assert not await takes_all()


async def test_without_redis_a_router_goes_on_with_what_it_has_counted_itself(
    start: Start, redis_server: tuple[EmbeddedRedis, str]
) -> None:
    ours, theirs = start(requests_per_minute=3), start(requests_per_minute=3)
    assert [await request(ours), await request(ours), await request(theirs)] == [0, 0, 0]
    assert await request(ours) > 0
    await redis_server[0].stop()
    assert await request(ours) == 0  # its third
    assert await request(ours) > 0
