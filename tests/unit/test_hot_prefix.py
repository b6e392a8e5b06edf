"""A prefix that everybody asks for, in virtual time: it spills over to other workers, and spreads.

The planner is the router's own; a prefill worker is a queue that computes one prompt after another
at the speed of its profile.
"""

import math
from contextlib import ExitStack
from dataclasses import dataclass, field

from baton.cluster.prefix_index import PrefixMatches
from baton.cluster.prefix_index.matches import key_of
from baton.cluster.workers import Role, WorkerLoad, WorkerRecord
from router.placement import RequestFacts, Rules
from router.placement.slo import Slo
from router.planner import Planner
from router.targets import Targets
from tests.support.candidates import PREFILL_STEP_S, TOKEN_S, record
from tests.support.stub_workers import LAYOUT

PROMPT, PREFIX = 1000, 960
TARGET_S = 1.5
WARM_S, COLD_S = (PREFILL_STEP_S + TOKEN_S * (PROMPT - n) for n in (PREFIX, 0))


@dataclass
class World:
    """`arrive` sends one request and says when its first token comes, after how long."""

    workers: list[WorkerRecord] = field(
        default_factory=lambda: [
            record(Role.PREFILL, "hot", chunk_size=2048),
            record(Role.PREFILL, "cold", chunk_size=2048),
            record(Role.DECODE, "d", max_num_seqs=1000, load=WorkerLoad(free_blocks=10**6)),
        ]
    )
    went: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._planner = Planner(Slo(), Rules(decode_prefills="never", backlog_s=math.inf))
        self._holding = {key_of(self.workers[0])}
        self._free_at = {worker.worker_id: 0.0 for worker in self.workers}
        self._running: list[tuple[float, ExitStack]] = []

    def arrive(self, now: float, shared: bool = True) -> float:
        self._end_until(now)
        facts = RequestFacts(PROMPT, 2, 1, Targets(ttft_s=TARGET_S))
        blocks = PREFIX // LAYOUT.block_size
        held = dict.fromkeys(self._holding if shared else (), blocks)
        plan = self._planner.plan(facts, self.workers, PrefixMatches(held))
        assert plan.prefill is not None
        name = plan.prefill.worker_id
        self.went.append(name)
        stack = ExitStack()
        stack.enter_context(self._planner.hold(plan, facts))
        took = WARM_S if shared and key_of(plan.prefill) in self._holding else COLD_S
        self._free_at[name] = max(now, self._free_at[name]) + took
        self._running.append((self._free_at[name], stack))
        if shared:
            self._holding.add(key_of(plan.prefill))
        return self._free_at[name] - now

    def _end_until(self, now: float) -> None:
        for ended in [entry for entry in self._running if entry[0] <= now]:
            self._running.remove(ended)
            ended[1].close()


def test_a_hot_prefix_goes_to_other_workers_before_its_targets_are_missed() -> None:
    """sgl-project/sglang#14305: one worker had every prompt of a prefix, the others idled."""
    world, every_s = World(), WARM_S / 2.5
    ttfts = sorted(world.arrive(number * every_s) for number in range(64))
    alone = sorted((n + 1) * WARM_S - n * every_s for n in range(64))
    p95 = 64 * 95 // 100
    assert world.went[:5] == ["hot"] * 5, "as long as it is quicker there"
    assert min(world.went.count("hot"), world.went.count("cold")) >= 8
    assert ttfts[p95] < 0.8 * alone[p95] and ttfts[-1] <= TARGET_S


def test_prompts_that_share_nothing_leave_a_busy_worker_alone() -> None:
    """vllm-project/production-stack#1035"""
    world = World()
    for _ in range(8):
        world.arrive(0.0)
    world.went.clear()
    assert world.arrive(0.0, shared=False) <= COLD_S + WARM_S
    assert world.went == ["cold"]
