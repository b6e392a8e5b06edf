"""Which workers a leg goes to: live ones of its model, judged by what they have cached.

Owns the waits for news of workers, and what a decision tells the ledger, the explanation and
other routers. Who is best among candidates is the planner's to say.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from baton.cluster.prefix_index import PrefixIndex, PrefixMatches
from baton.cluster.workers import Role, WorkerRecord
from router.job import Leg, Served, Workers
from router.placement import NoRoom, NoWorker, Plan
from router.planner import NOTHING_CACHED, Planner

# A suspect is back after a heartbeat: a request that lost its only worker waits that long.
REVIVAL_S = 2.0


@dataclass(frozen=True)
class Selection:
    """`fingerprint` names the model: workers of another one are never chosen."""

    fingerprint: str
    planner: Planner
    workers: Workers
    index: PrefixIndex | None = None

    def candidates(self, avoid: set[str] | frozenset[str] = frozenset()) -> list[WorkerRecord]:
        return [
            worker
            for worker in self.workers.snapshot()
            if worker.worker_id not in avoid and worker.layout.fingerprint == self.fingerprint
        ]

    async def refuse_if_late(self, leg: Leg, work_s: float) -> None:
        """Raises Unattainable when `work_s` seconds of prefill that wait already make it so."""
        workers = self.candidates()
        matches = await self._lookup(leg, workers)
        self.planner.refuse_if_late(leg.facts, workers, work_s, matches)

    async def choose(self, leg: Leg, full: set[str], served: Served) -> Plan:
        """Not those found `full`. Raises NoWorker or NoRoom."""
        workers = self.candidates(full)
        matches = await self._lookup(leg, workers)
        leg.turn.guessed = not matches.available
        plan = await self._find(leg, full, matches)
        if served.plan is None:
            served.plan = plan
            leg.job.trail.num_known_tokens = max(map(matches.held_tokens, workers), default=0)
            if leg.job.explain:
                candidates = self.candidates(full)
                served.alternatives = self.planner.alternatives(leg.facts, candidates, matches)
        return plan

    def take_over(self, leg: Leg, lost: WorkerRecord, decode: WorkerRecord) -> Plan | None:
        """Another prefill worker than `lost` for a promise of `decode`, if there is one."""
        avoid = {worker.worker_id for worker in (*leg.lost, lost)}
        for record in self.workers.snapshot():
            if record.role is Role.DECODE and record.worker_id != decode.worker_id:
                avoid.add(record.worker_id)
        try:
            return self._plan(leg, avoid, NOTHING_CACHED, split=True)
        except (NoWorker, NoRoom):
            return None

    def expecting(self, leg: Leg, plan: Plan) -> AbstractContextManager[None]:
        """Who asks where the prompt will be cached is told so from now on: where it is computed. A
        sibling that went to the decode worker of a pair would be there before the hand-off."""
        computing = plan.prefill or plan.decode
        return self._told(leg, computing) if computing else nullcontext()

    def landed(self, leg: Leg, decode: WorkerRecord) -> None:
        """The hand-off is committed: decode has it too, before it says so itself."""
        if not leg.ships_less:
            with self._told(leg, decode):
                pass  # nothing is left that could take it back

    def _told(self, leg: Leg, worker: WorkerRecord) -> AbstractContextManager[None]:
        return self.index.expecting(leg.blocks, [worker]) if self.index else nullcontext()

    async def _lookup(self, leg: Leg, workers: Sequence[WorkerRecord]) -> PrefixMatches:
        return await self.index.lookup(leg.blocks, workers) if self.index else PrefixMatches()

    async def _find(self, leg: Leg, full: set[str], matches: PrefixMatches) -> Plan:
        """After a failure other workers, or a revived one. A router that was stopped for a while
        suspects everybody until the next heartbeats."""
        lost = {worker.worker_id for worker in leg.lost}
        try:
            return self._plan(leg, full | lost, matches)
        except NoWorker:
            if not lost and not self.workers.doubted:
                raise
        give_up_at = time.monotonic() + REVIVAL_S
        while True:
            try:
                return self._plan(leg, full, matches)
            except NoWorker:
                if full or (left := give_up_at - time.monotonic()) <= 0:
                    raise
            await self.workers.wait_changed(left)

    def _plan(self, leg: Leg, avoid: set[str], matches: PrefixMatches, split: bool = False) -> Plan:
        return self.planner.plan(leg.facts, self.candidates(avoid), matches, split)
