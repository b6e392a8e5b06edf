"""The registry on every kind of Redis that a URL can name."""

from pathlib import Path

import pytest

from baton.cluster.errors import RegistryUnavailable
from baton.cluster.registry import Announcer, Directory, Registry
from baton.cluster.workers import WorkerRecord
from tests.support.redis import eventually, make_record, until
from tests.support.redis_servers import redis_7, redis_cluster, sentinel_pair, tls_redis


async def assert_a_worker_is_seen_and_leaves(url: str) -> None:
    registry, record = Registry(url), make_record()
    announcer, directory = Announcer(registry, lambda: record), Directory(registry, refresh_s=30)
    try:
        await directory.start()
        assert directory.connected
        await announcer.start()
        await eventually(lambda: directory.snapshot() == (record,))  # told, not polled
        await announcer.stop()
        await eventually(lambda: directory.snapshot() == ())
    finally:
        await directory.stop()
        await registry.close()


@redis_7
async def test_a_redis_with_tls_user_and_password_works(tmp_path: Path) -> None:
    try:
        server = tls_redis(tmp_path, "baton", "s3cret")
        url = await server.__aenter__()
    except RuntimeError as error:
        if "tls" not in str(error).lower():
            raise
        pytest.skip("this redis-server is built without TLS")
    try:
        await assert_a_worker_is_seen_and_leaves(url)
        wrong = Registry(url.replace("s3cret", "guess"))
        with pytest.raises(RegistryUnavailable):
            await wrong.ping()
        await wrong.close()
        untrusted = Registry(url.partition("?")[0])
        with pytest.raises(RegistryUnavailable, match="certificate"):
            await untrusted.ping()
        await untrusted.close()
    finally:
        await server.__aexit__(None, None, None)


@redis_7
async def test_a_redis_cluster_works(tmp_path: Path) -> None:
    async with redis_cluster(tmp_path) as url:
        await assert_a_worker_is_seen_and_leaves(url)


@redis_7
async def test_sentinel_names_the_master(tmp_path: Path) -> None:
    async with sentinel_pair(tmp_path, "cache") as (url, _):
        await assert_a_worker_is_seen_and_leaves(url)


@pytest.mark.slow
@redis_7
async def test_workers_are_seen_again_after_a_failover(tmp_path: Path) -> None:
    async with sentinel_pair(tmp_path, "cache") as (url, master):
        registry, record = Registry(url), make_record()
        announcer = Announcer(registry, lambda: record, interval_s=0.2)
        directory = Directory(registry, refresh_s=0.1)
        await announcer.start()
        await directory.start()
        assert directory.snapshot() == (record,)
        master.kill()
        await eventually(lambda: not directory.connected)
        await eventually(lambda: directory.connected, timeout_s=20)
        assert directory.snapshot() == (record,)
        await until(lambda: _lists(registry, record))
        await announcer.stop()
        await directory.stop()
        await registry.close()


async def _lists(registry: Registry, record: WorkerRecord) -> bool:
    return await registry.list() == [record]
