"""Plans requests: gathers what placement may know, keeps what was promised, learns what it took.

Owns the predictor, the policy and the loads; the conductor asks it where to send a request,
holds the promise while an attempt lasts and reports the timings that come back.
"""

import itertools
import math
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from baton.cluster.load_ledger import LoadLedger
from baton.cluster.prefix_index import PrefixMatches
from baton.cluster.workers import Role, WorkerRecord
from router.admission import Claim
from router.company import Company
from router.hold import Hold
from router.job import Job
from router.placement import (
    Candidate,
    NoRoom,
    NoWorker,
    Placement,
    Plan,
    RequestFacts,
    Rules,
    place,
)
from router.placement.explain import alternatives
from router.predictor import Phase, Predictor
from router.slow_start import SlowStart
from router.targets import Unattainable

ERRORS_KEPT = 200
NOTHING_CACHED = PrefixMatches()
_TAKE_OVER = Rules(decode_prefills="never", backlog_s=math.inf, promised=True)


class Planner:
    def __init__(
        self,
        policy: Placement,
        rules: Rules,
        predictor: Predictor | None = None,
        loads: LoadLedger | None = None,
        slow_start_s: float = 0.0,
    ) -> None:
        self.predictor = predictor or Predictor()
        self.on_room: Callable[[], None] = lambda: None
        """Called when a prefill worker can take another prompt."""
        self._policy = policy
        self._rules = rules
        self._loads = loads or LoadLedger()
        self._slow_start = SlowStart(slow_start_s)
        self._company = Company()
        self._numbers = itertools.count()
        self._reported: dict[str, tuple[WorkerRecord, int]] = {}
        self._tpot_targets: dict[str, list[float]] = {}
        self._ttft_errors: deque[float] = deque(maxlen=ERRORS_KEPT)

    # --- deciding ---------------------------------------------------------------------------

    def plan(
        self,
        facts: RequestFacts,
        workers: Sequence[WorkerRecord],
        matches: PrefixMatches = NOTHING_CACHED,
        split: bool = False,
    ) -> Plan:
        """Raises NoWorker or NoRoom. `split`: decode has its promise, prefill is looked for, and a
        request that had its turn does not wait for another."""
        facts = facts._replace(number=next(self._numbers))
        rules = _TAKE_OVER if split else self._rules
        candidates = self._candidates(workers, matches)
        return place(self._policy, facts, candidates, self.predictor, rules)

    def alternatives(
        self,
        facts: RequestFacts,
        workers: Sequence[WorkerRecord],
        matches: PrefixMatches = NOTHING_CACHED,
    ) -> list[Plan]:
        """The best ways to serve a request, best first."""
        candidates = self._candidates(workers, matches)
        return alternatives(facts, candidates, self.predictor, self._rules)

    def claim(self, facts: RequestFacts, workers: Sequence[WorkerRecord], job: Job) -> Claim:
        """What the request's turn in the queue depends on."""
        output = self.predictor.output_tokens(facts.max_tokens)
        worker = next((w for w in workers if w.role is Role.PREFILL), None) or next(
            iter(workers), None
        )
        prompt = facts.num_prompt_tokens
        return Claim(
            tenant=job.tenant,
            priority=facts.targets.priority,
            arrived_at=job.arrived_at,
            due_at=job.arrived_at + facts.targets.ttft_s,
            tokens=prompt + round(facts.n * output),
            work_s=self.predictor.prefill_s(worker, prompt) if worker else 0.0,
        )

    def refuse_if_late(
        self,
        facts: RequestFacts,
        workers: Sequence[WorkerRecord],
        queued_s: float,
        matches: PrefixMatches = NOTHING_CACHED,
    ) -> None:
        """For a request that wants it so: raises Unattainable when it is predicted to be late,
        with `queued_s` seconds of prefill ahead of it in the router's queue."""
        if not facts.targets.reject:
            return
        prefills = sum(worker.role is Role.PREFILL for worker in workers)
        waited_s = facts.waited_s + queued_s / max(prefills, 1)
        rules = replace(self._rules, backlog_s=math.inf)
        candidates = self._candidates(workers, matches)
        try:
            facts = facts._replace(waited_s=waited_s)
            plan = place(self._policy, facts, candidates, self.predictor, rules)
        except (NoWorker, NoRoom):
            return  # it waits, or is told so
        self.check(plan, facts)

    def check(self, plan: Plan, facts: RequestFacts) -> None:
        """Raises Unattainable when a request prefers that to the plan."""
        cost, targets = plan.cost, facts.targets
        late = cost.ttft_s > targets.ttft_s or (facts.needs_decode and cost.tpot_s > targets.tpot_s)
        if targets.reject and late:
            raise Unattainable(targets, cost.ttft_s, cost.tpot_s)

    @contextmanager
    def hold(self, plan: Plan, facts: RequestFacts) -> Iterator[Hold]:
        """Counts a plan as load of its workers while the context lasts."""
        hold = Hold(plan, facts, self._loads, self.predictor, self._company, self.on_room)
        for worker in filter(None, (plan.prefill, plan.decode)):
            self.predictor.sent(worker)
        targets: list[float] = []
        if plan.decode is not None:
            targets = self._tpot_targets.setdefault(plan.decode.worker_id, [])
            insort(targets, facts.targets.tpot_s)
        try:
            yield hold
        finally:
            hold.release()
            if hold.ttft_s:
                self._ttft_errors.append(abs(plan.cost.ttft_s - hold.ttft_s) / hold.ttft_s)
            if plan.decode is not None:
                targets.remove(facts.targets.tpot_s)

    def _candidates(
        self, workers: Sequence[WorkerRecord], matches: PrefixMatches
    ) -> list[Candidate]:
        candidates, now = [], time.monotonic()
        for worker in workers:
            load = self._loads.load(worker.worker_id)
            cached = matches.expected_tokens(worker)
            share = self._slow_start.share(worker)
            if worker.role is Role.PREFILL:
                company = self._company.now(worker.worker_id)
                # Its report of free blocks is older than most of its prompts: backlog_s bounds it.
                candidates.append(
                    Candidate(worker, *load, cached_tokens=cached, share=share, company=company)
                )
                continue
            targets = self._tpot_targets.get(worker.worker_id)
            company = self._company.ahead(worker.worker_id, now)
            candidates.append(
                Candidate(
                    worker,
                    *load,
                    free_blocks=self._free_blocks(worker, load.tokens),
                    cached_tokens=cached,
                    prefilling=self._loads.load(f"{worker.worker_id}/prefill"),
                    tightest_tpot_s=targets[0] if targets else float("inf"),
                    share=share,
                    company=company,
                )
            )
        return candidates

    def _free_blocks(self, worker: WorkerRecord, tokens: int) -> int:
        """The last report, corrected by what has been given and returned since it came."""
        known = self._reported.get(worker.worker_id)
        if known is None or known[0] is not worker:
            known = self._reported[worker.worker_id] = worker, tokens
        size = worker.layout.block_size
        return worker.load.free_blocks - (tokens - known[1]) // size

    # --- learning ---------------------------------------------------------------------------

    def saw_output(self, tokens: int) -> None:
        self.predictor.saw_output(tokens)

    def saw_workers(self, workers: Sequence[WorkerRecord], now: float) -> None:
        """Notes newcomers, and forgets those that are gone."""
        self._slow_start.saw(workers, now)
        self._company.saw(workers)
        ids = {worker.worker_id for worker in workers}
        self.predictor.keep_only(workers)
        self._reported = {k: v for k, v in self._reported.items() if k in ids}
        self._tpot_targets = {k: v for k, v in self._tpot_targets.items() if v or k in ids}

    def mape(self, phase: str) -> float | None:
        """Of the predictor's phases, or of "ttft": the prediction that decisions rested on."""
        if phase == "ttft":
            errors = self._ttft_errors
            return sum(errors) / len(errors) if errors else None
        return self.predictor.mape(Phase(phase))
