"""The ACL of docs/security.md, word for word, on a Redis that speaks TLS only: it is enough for a
whole cluster, and for nothing else."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from baton.store import StoredModel
from tests.support.cluster import COMPLETIONS, running_cluster
from tests.support.redis import until_equal
from tests.support.redis_servers import redis_7, tls_redis

pytestmark = redis_7

DOCUMENT = Path(__file__).parents[2] / "docs" / "security.md"
PROMPT = list(range(20, 120))


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    documented = re.findall(r"^user baton .*$", DOCUMENT.read_text(), flags=re.MULTILINE)
    assert len(documented) == 1
    acl = [documented[0].replace("CHANGE_ME", "s3cret"), "user root on >root ~* &* +@all"]
    async with tls_redis(tmp_path, "baton", "s3cret", acl) as url:
        yield url


async def test_a_cluster_does_all_its_work_under_the_documented_acl(
    tiny_chat: StoredModel, url: str
) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}
    async with running_cluster(tiny_chat, prefills=2, redis_url=url) as cluster:
        for _ in range(3):
            await cluster.ask(COMPLETIONS, **body)
        totals = await cluster.totals(cluster.prefills)
        assert totals.handoffs == 3
        index = cluster.gateway.shared.index
        assert index is not None and cluster.gateway.shared.healthy

        async def hit() -> int:
            return (await cluster.ask(COMPLETIONS, **body)).num_cached

        await until_equal(hit, 96)
        limits = cluster.gateway.shared.limits
        assert limits is not None and await limits.wait_s("x", 1, 1) == 0
        assert await limits.wait_s("x", 1, 1) > 0
        assert (await cluster.client.get("/health")).json()["status"] == "ok"
    async with Redis.from_url(url.replace("baton:s3cret", "root:root")) as root:
        assert await root.acl_log() == []
        assert await root.keys("*")


async def test_the_documented_user_can_neither_look_around_nor_destroy(url: str) -> None:
    async with Redis.from_url(url) as client:
        for command in (
            ("KEYS", "*"), ("SCAN", "0"), ("FLUSHALL",), ("CONFIG", "GET", "*"), ("ACL", "LIST"),
            ("MONITOR",), ("EVAL", "return 1", "0"), ("SCRIPT", "FLUSH"), ("CLIENT", "LIST"),
            ("GET", "other"), ("SET", "other", "1"), ("PUBLISH", "other", "x"),
        ):  # fmt: skip
            with pytest.raises(NoPermissionError):
                await client.execute_command(*command)
