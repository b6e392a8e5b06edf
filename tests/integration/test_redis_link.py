"""What an outage of Redis leaves behind."""

import asyncio
import os
import signal

import pytest
from redis.asyncio import Redis

from baton.cluster.errors import RegistryUnavailable
from baton.cluster.redis_link import MAX_CALLS, RedisLink
from baton.cluster.redis_server import EmbeddedRedis
from tests.support.redis import eventually, until

CROWD = 3 * MAX_CALLS


async def test_an_outage_leaves_no_more_connections_than_there_are_calls_at_once(
    redis_server: tuple[EmbeddedRedis, str],
) -> None:
    """Of calls that are given up, more than that are in the client's pool; they stayed there."""
    server, url = redis_server
    assert server.pid is not None
    link, watcher = RedisLink(url), Redis.from_url(url)

    async def few_are_left() -> bool:
        return len(await watcher.client_list()) <= MAX_CALLS + 1  # and the watcher's own

    await link.start()
    try:
        await asyncio.gather(*(link.client.blpop("nothing", 0.5) for _ in range(CROWD)))
        assert len(await watcher.client_list()) > CROWD
        os.kill(server.pid, signal.SIGSTOP)
        with pytest.raises(RegistryUnavailable):
            await link.call(link.client.ping, 0.03)
        assert not link.healthy
        os.kill(server.pid, signal.SIGCONT)
        await eventually(lambda: link.healthy)
        await until(few_are_left)
    finally:
        os.kill(server.pid, signal.SIGCONT)
        await watcher.aclose()
        await link.close()
