"""A process is killed, stopped or cut off at an exact moment: the client gets the undisturbed
text, nobody hangs, and whoever is left holds nothing.
"""

import asyncio
from typing import Any

import pytest

from tests.support.answers import Answer
from tests.support.chaos_cluster import ChaosCluster
from tests.support.hosts import namespaces_allowed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="session"),
]

BODY: dict[str, Any] = {
    "prompt": "The quick brown fox jumps over the lazy dog. " * 6,
    "max_tokens": 24,
    "ignore_eos": True,
    "temperature": 0.8,
    "top_k": 8,
    "seed": 3,
}
MOMENTS = {
    "before the first frame": ("prefill.frame", 0),
    "mid-frames": ("decode.frame", 3),
    "at commit": ("decode.commit", 0),
    "mid-decode": ("decode.step", 4),
}
HOWS = ["kill", "stop", "cut"]
NO_HANG_S = 40.0
# What every change is tested with; `make chaos` runs all.
BRIEF = {
    ("prefill", "kill", "mid-frames"),
    ("prefill", "stop", "at commit"),
    ("decode", "kill", "mid-decode"),
    ("decode", "stop", "mid-frames"),
    ("decode", "cut", "mid-decode"),
    ("router", "kill", "mid-decode"),
}


def matrix(victims: list[str]) -> list[Any]:
    return [
        pytest.param(
            victim,
            how,
            moment,
            id=f"{victim}-{how}-{moment}",
            marks=[pytest.mark.brief] if (victim, how, moment) in BRIEF else [],
        )
        for victim in victims
        for how in HOWS
        for moment in MOMENTS
    ]


@pytest.fixture
def may_cut(request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["how"] == "cut" and not namespaces_allowed():
        pytest.skip("a cut needs network namespaces, and they need CAP_NET_ADMIN")


async def undisturbed(cluster: ChaosCluster) -> Answer:
    """By the transport of the test, which the first hand-off may have had no time to connect."""
    async with asyncio.timeout(NO_HANG_S):
        while True:
            answer = await cluster.ask(**BODY)
            if await cluster.transport_used() == cluster.transport:
                return answer


def arm(cluster: ChaosCluster, victim: str, how: str, moment: str) -> asyncio.Event:
    async def strike() -> None:
        getattr(cluster.busy(victim), how)()

    point, after = MOMENTS[moment]
    return cluster.faults.arm(point, strike, after)


def assert_same(answer: Answer, expected: Answer) -> None:
    assert answer.texts == expected.texts
    assert answer.tokens == expected.tokens, "a token is missing or came twice"
    assert answer.reasons == expected.reasons and answer.counts == expected.counts


@pytest.mark.usefixtures("may_cut")
@pytest.mark.parametrize(("victim", "how", "moment"), matrix(["prefill", "decode"]))
async def test_a_lost_worker_changes_no_token_and_leaves_nothing_held(
    cluster: ChaosCluster, victim: str, how: str, moment: str
) -> None:
    expected = await undisturbed(cluster)
    cluster.faults.disarm()
    reserved = cluster.faults.passed["decode.reserve"]
    struck = arm(cluster, victim, how, moment)
    async with asyncio.timeout(NO_HANG_S):
        answer = await cluster.ask(**BODY)
    assert struck.is_set(), "the fault never happened"
    assert_same(answer, expected)
    if victim == "prefill":
        promises = cluster.faults.passed["decode.reserve"] - reserved
        assert promises == 1, "another prefill takes over for the same reservation"
    await cluster.wait_at_rest()
    await cluster.restore()  # a stopped or cut off one comes back, and holds nothing either
    assert_same(await undisturbed(cluster), expected)


@pytest.mark.usefixtures("may_cut")
@pytest.mark.parametrize(("victim", "how", "moment"), matrix(["router"]))
async def test_workers_give_back_all_that_a_lost_router_held(
    cluster: ChaosCluster, victim: str, how: str, moment: str
) -> None:
    """They are at rest while the router is still gone. One that was only stopped goes on; from
    one that was cut off the client hears the rest, or an error: never a false end."""
    expected = await undisturbed(cluster)
    struck = arm(cluster, victim, how, moment)
    asking = asyncio.create_task(cluster.ask(**BODY))
    async with asyncio.timeout(NO_HANG_S):
        await struck.wait()
        await cluster.wait_at_rest()
        await cluster.restore()
        (ended,) = await asyncio.gather(asking, return_exceptions=True)
    if how == "stop" or not isinstance(ended, BaseException):
        assert isinstance(ended, Answer), ended
        assert_same(ended, expected)
    assert_same(await undisturbed(cluster), expected)
    await cluster.wait_at_rest()
