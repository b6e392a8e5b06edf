"""A worker that looks slower than it is gets tried again, and one that is slow does not often.

In virtual time: the planner is the router's own, a prefill worker computes one prompt after another
and tells afterwards what it took.
"""

import math
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.cluster.workers import Role, WorkerLoad
from baton.step_totals import StepTotals, chunk_attention
from router.placement import RequestFacts, Rules
from router.placement.slo import Slo
from router.planner import Planner
from router.predictor import Predictor
from router.predictor.doubt import PATIENCE, Doubts
from tests.support.candidates import PREFILL_STEP_S, TOKEN_S, record, speed

PROMPT = 400
PROMPT_S = PREFILL_STEP_S + TOKEN_S * PROMPT
DECODE = record(Role.DECODE, "d", max_num_seqs=1000, load=WorkerLoad(free_blocks=10**6))


class World:
    """`slow` says it takes `said` times, and takes `true` times, as long as each of its peers."""

    def __init__(self, peers: int, said: float, true: float) -> None:
        self.slow = record(Role.PREFILL, "slow", profile=speed(said))
        self.workers = [self.slow, *(record(Role.PREFILL, f"p{n}") for n in range(peers)), DECODE]
        self.planner = Planner(Slo(), Rules(decode_prefills="never", backlog_s=math.inf))
        self.went: list[str] = []
        self._true = true
        self._free_at = {worker.worker_id: 0.0 for worker in self.workers}
        self._running: list[tuple[float, float, ExitStack]] = []

    def arrive(self, now: float) -> None:
        self._end_until(now)
        facts = RequestFacts(PROMPT, 2, 1)
        plan = self.planner.plan(facts, self.workers)
        assert plan.prefill is not None
        self.went.append(name := plan.prefill.worker_id)
        took = PROMPT_S * (self._true if plan.prefill is self.slow else 1.0)
        stack = ExitStack()
        self._free_at[name] = max(now, self._free_at[name]) + took
        totals = StepTotals(1, PROMPT, chunk_attention(0, PROMPT), 0, 0, took)
        stack.callback(self.planner.predictor.saw_steps, plan.prefill, totals)
        stack.enter_context(self.planner.hold(plan, facts))
        self._running.append((self._free_at[name], len(self.went), stack))

    def _end_until(self, now: float) -> None:
        for ended in sorted(entry for entry in self._running if entry[0] <= now):
            self._running.remove(ended)
            ended[2].close()

    def run(self, requests: int, load: float) -> None:
        """`load`: of what the peers alone can do."""
        every_s = PROMPT_S / (load * (len(self.workers) - 2))
        for number in range(requests):
            self.arrive(number * every_s)


@settings(max_examples=5, deadline=None)
@given(st.integers(1, 3), st.floats(3.0, 50.0))
def test_whoever_measured_itself_while_it_was_starved_is_found_out(peers: int, said: float) -> None:
    """It was never tried again, whatever the load: nothing came back that could correct it."""
    world = World(peers, said, true=1.0)
    world.run(6 * PATIENCE * (peers + 1), load=1.2)
    assert world.planner.predictor.prefill_s(world.slow, PROMPT) == pytest.approx(PROMPT_S, rel=0.2)
    assert world.went[-60:].count("slow") >= 60 // (peers + 1) // 2, "less than half its share"


@settings(max_examples=5, deadline=None)
@given(st.integers(1, 3), st.floats(3.0, 50.0))
def test_a_slow_worker_is_tried_once_in_a_while_and_no_more(peers: int, true: float) -> None:
    world = World(peers, said=true, true=true)
    requests = 6 * PATIENCE * (peers + 1)
    world.run(requests, load=0.6)
    assert world.went.count("slow") <= requests / (PATIENCE * (peers + 1)) + 1


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from("abc"), max_size=20), st.integers(1, 300), st.floats(0.1, 50.0))
def test_a_doubted_prediction_lies_between_its_own_and_that_of_its_peers(
    before: list[str], silent: int, said: float
) -> None:
    predictor, worker = Predictor(), record(Role.PREFILL, "w", profile=speed(said))
    own_s = predictor.prefill_s(worker, PROMPT)
    totals = StepTotals(1, PROMPT, chunk_attention(0, PROMPT), 0, 0, PROMPT_S)
    for name in [*before, *["a"] * silent]:
        predictor.saw_steps(record(Role.PREFILL, name), totals)
    believed_s = predictor.prefill_s(worker, PROMPT)
    assert min(own_s, 0.99 * PROMPT_S) <= believed_s <= own_s
    predictor.sent(worker)
    assert predictor.prefill_s(worker, PROMPT) == own_s


def test_doubt_begins_after_patience_and_is_whole_after_twice_as_long() -> None:
    doubts, seen = Doubts(), []
    for name in ("silent", "talks"):
        doubts.tried(name)
    for _ in range(5 * PATIENCE):
        doubts.heard("talks")
        seen.append(doubts.of.get("silent", 0.0))
    assert seen == sorted(seen) and seen[-1] == 1.0 and "talks" not in doubts.of
    assert seen[2 * PATIENCE] == 0.0 < seen[2 * PATIENCE + 2] < 0.1
    doubts.heard("silent")
    assert not doubts.of
    doubts.keep_only({"talks"})
    for _ in range(3 * PATIENCE):
        doubts.heard("talks")
    assert not doubts.of, "nobody else is left"
