"""Hosts of their own, joined by links that are cut and healed; and how soon a loss is noticed."""

import asyncio
import time
from typing import Any

import pytest

from tests.chaos.test_faults import BODY, NO_HANG_S, assert_same, undisturbed
from tests.support.answers import Answer
from tests.support.chaos_cluster import ChaosCluster
from tests.support.hosts import namespaces_allowed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="session"),
]
needs_hosts = pytest.mark.skipif(
    not namespaces_allowed(), reason="hosts are network namespaces, and they need CAP_NET_ADMIN"
)
over_the_network = pytest.mark.parametrize("processes", ["torch", "grpc"], indirect=True)
# Of `peer_timeout_s`, 3 s: it is the time by which a stopped process must be out of use.
GLITCH_S = 0.3
DEAD_S = 1.0
STALLED_S = 3.0
POLL_S = 2.0
"""How late the test itself may notice, on a busy machine."""


@needs_hosts
@over_the_network
async def test_no_two_processes_share_a_host(cluster: ChaosCluster) -> None:
    addresses = [node.host.address for node in cluster.nodes.values()]
    namespaces = {node.host.namespace for node in cluster.nodes.values()}
    assert len(set(addresses)) == len(namespaces) == len(cluster.nodes) and "" not in namespaces
    assert (await undisturbed(cluster)).counts[1] == BODY["max_tokens"]


@needs_hosts
@over_the_network
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("point", ["decode.frame", "decode.step"])
async def test_a_link_that_is_back_before_the_silence_counts_costs_a_pause_and_no_retry(
    cluster: ChaosCluster, role: str, point: str
) -> None:
    expected = await undisturbed(cluster)
    before = await cluster.retries()

    async def glitch() -> None:
        node = cluster.busy(role)
        node.cut()
        asyncio.get_running_loop().call_later(GLITCH_S, node.heal)

    struck = cluster.faults.arm(point, glitch, 3)
    async with asyncio.timeout(NO_HANG_S):
        assert_same(await cluster.ask(**BODY), expected)
        await struck.wait()
    assert await cluster.retries() == before
    await cluster.wait_at_rest()


@needs_hosts
@over_the_network
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_cut_off_in_mid_transfer_is_used_again_when_its_link_heals(
    cluster: ChaosCluster, role: str
) -> None:
    """By the same transport: groups and connections of before the cut are replaced."""
    expected = await undisturbed(cluster)
    victims = []

    async def cut() -> None:
        victims.append(cluster.busy(role))
        victims[0].cut()

    cluster.faults.arm("decode.frame", cut, 2)
    async with asyncio.timeout(NO_HANG_S):
        assert_same(await cluster.ask(**BODY), expected)
    await cluster.wait_at_rest()
    (victim,) = victims
    victim.heal()
    await cluster.restore()
    point = "prefill.frame" if role == "prefill" else "decode.reserve"
    used, transports = cluster.faults.by[victim.name, point], set()
    async with asyncio.timeout(NO_HANG_S):
        while cluster.faults.by[victim.name, point] == used or len(transports) == 0:
            answers = await asyncio.gather(*(cluster.ask(**BODY) for _ in range(4)))
            for answer in answers:
                assert_same(answer, expected)
            transports.add(await cluster.transport_used())
    assert transports == {cluster.transport}


@pytest.mark.brief
@pytest.mark.parametrize("processes", ["grpc"], indirect=True)
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(("how", "limit_s"), [("kill", DEAD_S), ("stop", STALLED_S)])
async def test_a_loss_is_noticed_in_time(
    cluster: ChaosCluster, role: str, how: str, limit_s: float
) -> None:
    """Measured while a request is on the worker, from the fault until the router uses it no more.
    A dead process within a second, a stopped one within the deadline for silence."""
    struck: dict[str, Any] = {}

    async def strike() -> None:
        struck["node"] = cluster.busy(role)
        getattr(struck["node"], how)()
        struck["at"] = time.monotonic()

    armed = cluster.faults.arm("decode.frame", strike, 2)
    asking = asyncio.create_task(cluster.ask(**BODY))
    async with asyncio.timeout(NO_HANG_S):
        await armed.wait()
        while struck["node"].name in await cluster.known():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        noticed_s = time.monotonic() - struck["at"]
        assert isinstance(await asking, Answer)
    assert noticed_s < limit_s + POLL_S
