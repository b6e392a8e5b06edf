"""What a worker is told of a plan."""

from types import SimpleNamespace
from typing import Any

import pytest

from baton.cluster.workers import Role
from router.dialer import max_uncached
from router.job import Turn
from router.placement import Plan
from router.placement.cost import Cost
from tests.support.candidates import record

PREFILL = record(Role.PREFILL, "p")
ONE, OTHER = (record(Role.DECODE, name, chunk_size=128) for name in ("d1", "d2"))
CACHED = Cost(cached_tokens=512, uncached_tokens=40)
ELSEWHERE = Plan(PREFILL, OTHER, Cost())


def leg(*full: str, guessed: bool = False) -> Any:
    return SimpleNamespace(turn=Turn(set(full), guessed))


def test_decode_may_compute_a_step_more_than_a_plan_that_counts_on_its_cache_says() -> None:
    assert max_uncached(leg(), Plan(None, ONE, CACHED, other=ELSEWHERE)) == 168


@pytest.mark.parametrize(
    ("at", "plan"),
    [
        (leg(), Plan(PREFILL, ONE, CACHED, other=ELSEWHERE)),  # prefill computes
        (leg(), Plan(None, ONE, Cost(uncached_tokens=552), other=ELSEWHERE)),  # no cache is wanted
        (leg(), Plan(None, ONE, CACHED)),  # nobody else could
        (leg(), Plan(None, ONE, CACHED, other=Plan(PREFILL, ONE, Cost()))),
        (leg("d2"), Plan(None, ONE, CACHED, other=ELSEWHERE)),  # somebody has refused already
        (leg(guessed=True), Plan(None, ONE, CACHED, other=ELSEWHERE)),  # without an index
    ],
)
def test_otherwise_it_computes_what_there_is(at: Any, plan: Plan) -> None:
    assert max_uncached(at, plan) is None
