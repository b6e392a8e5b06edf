"""Readiness tells whether requests can be served now; liveness is another thing."""

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest

from tests.chaos.test_faults import BODY, assert_same, undisturbed
from tests.support.chaos_cluster import ChaosCluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="session"),
]
NOTICED_WITHIN_S = 15.0
"""Records live for 3 s; the rest is for a busy machine."""


@pytest.mark.parametrize("processes", ["grpc"], indirect=True)
@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_readiness_ends_when_all_workers_of_a_role_stand_still_and_comes_back_with_them(
    cluster: ChaosCluster, role: str
) -> None:
    """vllm-project/vllm#36960: /health was 200 while nothing could be served."""
    expected = await undisturbed(cluster)
    stopped = [node for node in cluster.workers if node.role == role]
    async with cluster.client() as client:

        async def ready() -> httpx.Response:
            return await client.get("/health/ready")

        for node in stopped:
            node.stop()
        await _until(ready, lambda answer: answer.status_code == 503)
        answer = await ready()
        assert answer.json()["missing"] == [role] and role in answer.json()["reason"]
        assert (await client.get("/health/live")).status_code == 200
        for node in stopped:
            node.restore()
        await _until(ready, lambda answer: answer.status_code == 200)
    assert_same(await cluster.ask(**BODY), expected)


async def _until(
    ask: Callable[[], Awaitable[httpx.Response]], good: Callable[[httpx.Response], bool]
) -> None:
    async with asyncio.timeout(NOTICED_WITHIN_S):
        while not good(await ask()):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
