"""How pools grow and shrink: bounds, enough workers, and no going up and down under one load."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from baton_ray.autoscale.policy import PoolPolicy, PoolState, Rules
from baton_ray.autoscale.signals import Targets, gauge, pools
from hypothesis import given
from hypothesis import strategies as st

from baton.cluster.workers import Role, WorkerRecord
from tests.support.redis import make_record

RULES = Rules(up_after_s=4, down_after_s=20)
bounds = st.tuples(st.integers(0, 6), st.integers(0, 12)).map(lambda b: (b[0], b[0] + b[1]))
loads = st.floats(0, 30)


def course(
    policy: PoolPolicy, load_at: Callable[[int], float], steps: int = 400, missed: float = 0.0
) -> list[int]:
    """The wanted counts, one a second."""
    return [policy.decide(float(t), PoolState(load_at(t), missed)) for t in range(steps)]


def turns(counts: Sequence[int]) -> int:
    """How often a course of counts changes its direction."""
    steps = [b - a for a, b in itertools.pairwise(counts) if a != b]
    return sum(a * b < 0 for a, b in itertools.pairwise(steps))


@given(bounds, st.lists(st.tuples(loads, st.floats(0, 1)), max_size=200))
def test_the_count_stays_within_its_bounds_whatever_is_seen(
    bound: tuple[int, int], seen: list[tuple[float, float]]
) -> None:
    policy = PoolPolicy(*bound, RULES)
    for t, (load, missed) in enumerate(seen):
        assert bound[0] <= policy.decide(float(t), PoolState(load, missed)) <= bound[1]


@given(bounds, loads, st.floats(0, 0.1))
def test_constant_load_moves_the_count_in_one_direction_and_then_not_at_all(
    bound: tuple[int, int], load: float, missed: float
) -> None:
    counts = course(PoolPolicy(*bound, RULES), lambda _: load, missed=missed)
    assert turns(counts) == 0 and len(set(counts[200:])) == 1


@given(bounds, st.floats(0.5, 20), st.lists(st.floats(0.8, 1.0), min_size=400, max_size=400))
def test_load_that_varies_by_a_fifth_never_turns_the_count(
    bound: tuple[int, int], load: float, noise: list[float]
) -> None:
    counts = course(PoolPolicy(*bound, RULES), lambda t: load * noise[t])
    assert turns(counts) == 0


@given(st.integers(1, 4), loads)
def test_what_settles_is_enough_and_not_too_much(least: int, load: float) -> None:
    policy = PoolPolicy(least, 100, RULES)
    settled = course(policy, lambda _: load)[-1]
    assert load <= RULES.high * settled
    assert settled == least or load >= RULES.low * (settled - 1)


@given(st.integers(2, 8), st.floats(0.5, 10))
def test_misses_that_enough_workers_cure_do_not_make_it_go_up_and_down(
    cure: int, load: float
) -> None:
    """One fewer than `cure` misses every target: it is tried once, and remembered."""
    policy, counts = PoolPolicy(1, 12, RULES), []
    for t in range(1500):
        missed = 1.0 if policy.wanted < cure else 0.0
        counts.append(policy.decide(float(t), PoolState(load, missed)))
    assert turns(counts) == 0 and len(set(counts[700:])) == 1


def test_a_peak_shorter_than_the_patience_changes_nothing() -> None:
    policy = PoolPolicy(1, 8, RULES)
    assert set(course(policy, lambda t: 5.0 if t % 10 < 3 else 0.5)) == {1}


def test_misses_of_a_pool_that_idles_call_for_nobody() -> None:
    """The model itself may be slower than the target: more workers would idle too."""
    assert set(course(PoolPolicy(2, 8, RULES), lambda _: 0.1, missed=1.0)) == {2}


def test_a_burst_grows_by_doubling_and_its_end_shrinks_one_by_one() -> None:
    policy = PoolPolicy(1, 16, RULES)
    counts = course(policy, lambda t: 9.0 if t < 100 else 0.0, 800)
    grown = list(dict.fromkeys(counts[:100]))
    assert grown == [1, 2, 4, 8, 14]
    assert list(dict.fromkeys(counts[100:])) == list(range(14, 0, -1))
    assert turns(counts) == 1


def test_a_pool_may_shrink_to_nothing_and_comes_back_with_the_first_request() -> None:
    policy = PoolPolicy(0, 2, RULES)
    assert course(policy, lambda _: 0.0)[-1] == 0
    assert course(policy, lambda _: 0.25, 10)[-1] == 1


# --- what load is -----------------------------------------------------------------------------

REPORT: dict[str, Any] = {
    "predicted_ttft_ms": None,
    "predicted_tpot_ms": None,
    "with_phases": 0,
    "misses": {"ttft": {}, "tpot": {}},
}


def record(name: str, **load: int) -> WorkerRecord:
    return dataclasses.replace(make_record(name, **load), num_blocks=100, max_num_seqs=10)


def states(
    *records: WorkerRecord, queue: float = 0, targets: Targets | None = None, **report: Any
) -> dict[Role, PoolState]:
    return pools(records, queue, REPORT | report, targets or Targets())


def test_decode_is_as_loaded_as_its_seats_or_its_blocks_whichever_are_scarcer() -> None:
    seats = record("decode-0", running=6, waiting=1, free_blocks=90)
    blocks = record("decode-1", running=1, free_blocks=30, promised_blocks=20)
    assert states(seats, blocks)[Role.DECODE].load == pytest.approx(0.7 + 0.9)


def test_prompts_that_wait_load_prefill_unless_decode_is_full() -> None:
    prefill = record("prefill-0", running=1, waiting=2, free_blocks=100)
    idle = record("decode-0", running=2, free_blocks=100)
    full = record("decode-0", running=10, free_blocks=100)
    assert states(prefill, idle, queue=6)[Role.PREFILL].load == pytest.approx(1 + 0.5 + 1.5)
    seen = states(prefill, full, queue=5)
    assert seen[Role.PREFILL].load == pytest.approx(1.5)
    assert seen[Role.DECODE].load == pytest.approx(1.5)


def test_misses_count_for_the_pool_that_caused_them() -> None:
    causes = {"ttft": {"prefill_queue": 3, "router": 2}, "tpot": {"decode_batch": 1}}
    seen = states(with_phases=10, misses=causes)
    assert seen[Role.PREFILL].missed == pytest.approx(0.3)
    assert seen[Role.DECODE].missed == pytest.approx(0.1)


def test_a_predicted_latency_beyond_the_target_counts_before_anything_is_missed() -> None:
    targets = Targets(ttft_ms=500, tpot_ms=50)
    seen = states(predicted_ttft_ms=501.0, predicted_tpot_ms=49.0, targets=targets)
    assert (seen[Role.PREFILL].missed, seen[Role.DECODE].missed) == (1.0, 0.0)


def test_a_gauge_is_found_in_an_exposition() -> None:
    text = "# TYPE baton_queue_length gauge\nbaton_queue_length 3.0\nbaton_queue_length_x 4\n"
    assert gauge(text, "baton_queue_length") == 3.0
    with pytest.raises(KeyError):
        gauge(text, "baton_other")
