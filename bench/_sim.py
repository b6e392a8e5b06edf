"""A cluster in virtual time around the router's own placement, predictor and queue.

Only the workers (`_sim_workers.py`) are simulated. Service times are injected (`Speed`), with
noise; the predictor learns them as it would in life.
"""

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from _sim_workers import CHUNK, NOISE, Arrival, Core, Request, Worker

from baton.cluster.load_ledger import Load, LoadLedger
from baton.cluster.workers import Role
from baton.step_totals import StepTotals
from router.company import Company
from router.fair_queue import PATIENCE_S, FairQueue, Ticket
from router.placement import POLICIES, Candidate, NoRoom, Plan, RequestFacts, Rules, place
from router.predictor import Predictor
from router.targets import Targets

TRANSFER_BASE_S, BYTES_PER_S = 0.002, 1e9


class Simulation:
    """`arrivals` in order of time. Run once."""

    def __init__(
        self,
        workers: Sequence[Worker],
        policy: str,
        targets: Targets,
        rules: Rules,
        block_tokens: int,
        seed: int = 0,
    ) -> None:
        self.predictor = Predictor()
        self._workers = {worker.record.worker_id: worker for worker in workers}
        self._policy = POLICIES[policy]()
        self._targets = targets
        self._rules = rules
        self._block_tokens = block_tokens
        self._rng = random.Random(seed)
        self._loads = LoadLedger()
        self._company = Company()
        self._company.saw([worker.record for worker in workers])
        self._queue = FairQueue()
        self._tickets: dict[Ticket, Request] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now = 0.0

    def run(self, arrivals: Sequence[Arrival]) -> list[Request]:
        requests = [Request(arrival, number) for number, arrival in enumerate(arrivals)]
        for request in requests:
            self._at(request.arrival.at_s, lambda r=request: self._arrive(r))  # type: ignore[misc]
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            event()
        return requests

    def _at(self, time_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), event))

    # --- router -----------------------------------------------------------------------------

    def _arrive(self, request: Request) -> None:
        arrival = request.arrival
        due_at = arrival.at_s + self._targets.ttft_s
        ticket = Ticket(request.number, arrival.at_s, due_at=due_at, tokens=arrival.input_tokens)
        first = next(iter(self._workers.values())).record
        ticket.work_s = self.predictor.prefill_s(first, arrival.input_tokens)
        self._tickets[ticket] = request
        self._queue.push(ticket)
        self._grant()

    def _grant(self) -> None:
        """As the gateway: turns are given while the workers have room."""
        while len(self._queue):
            ticket = self._queue.pop(self._now)
            request = self._tickets[ticket]
            try:
                self._place(request)
            except NoRoom:
                self._queue.push(ticket)
                return
            del self._tickets[ticket]

    def _place(self, request: Request) -> None:
        arrival = request.arrival
        facts = RequestFacts(
            arrival.input_tokens,
            arrival.output_tokens,
            1,
            self._targets,
            self._now - arrival.at_s,
            request.number,
        )
        candidates = [self._candidate(worker, request) for worker in self._workers.values()]
        plan = place(self._policy, facts, candidates, self.predictor, self._rules)
        request.plan = plan
        # As workers do: what is late already goes behind what is not, for a while.
        due_at = arrival.at_s + self._targets.ttft_s
        request.due_at = due_at if self._now < due_at else self._now + PATIENCE_S
        first = plan.prefill or plan.decode
        assert first is not None
        worker = self._workers[first.worker_id]
        self._claim(request, plan)
        for block in arrival.blocks:
            worker.coming[block] = worker.coming.get(block, 0) + 1
        worker.prompts.append(request)
        request.stay = self._company.stay(first.worker_id, self._now)
        self._wake(worker)

    def _candidate(self, worker: Worker, request: Request) -> Candidate:
        record = worker.record
        requests, tokens = self._loads.load(record.worker_id)
        on_prefill = record.role is Role.PREFILL
        worker_id, company = record.worker_id, self._company
        return Candidate(
            record,
            requests,
            tokens,
            free_blocks=record.num_blocks - tokens // record.layout.block_size,
            cached_tokens=worker.cached_tokens(request, self._block_tokens, expected=True),
            prefilling=self._loads.load(f"{record.worker_id}/prefill"),
            tightest_tpot_s=self._targets.tpot_s if requests else math.inf,
            company=company.now(worker_id) if on_prefill else company.ahead(worker_id, self._now),
        )

    def _claim(self, request: Request, plan: Plan) -> None:
        prompt = Load(1, plan.cost.uncached_tokens)
        request.claims = {}
        if plan.decode is not None:
            context = round(request.arrival.input_tokens + plan.cost.output_tokens / 2)
            request.claims[plan.decode.worker_id] = Load(1, context)
        alone = plan.prefill is None and plan.decode is not None
        key = f"{plan.decode.worker_id}/prefill" if alone else plan.prefill.worker_id  # type: ignore[union-attr]
        request.claims[key] = prompt
        self._loads.add(request.claims)

    def _unclaim(self, request: Request, keys: Sequence[str]) -> None:
        claims = {key: request.claims.pop(key) for key in keys if key in request.claims}
        self._loads.remove(claims)
        self._grant()

    # --- workers ----------------------------------------------------------------------------

    def _wake(self, worker: Worker) -> None:
        if worker.busy or not (worker.prompts or worker.decoding):
            return
        for request in worker.prompts:
            if not request.uncached:
                cached = worker.cached_tokens(request, self._block_tokens, expected=False)
                request.uncached = request.arrival.input_tokens - cached
        worker.busy = True
        work, chunks, decoding = worker.batch()
        began_at = self._now
        seconds = worker.speed.step(work, self._rng).seconds

        def end() -> None:
            totals = replace(work, seconds=self._now - began_at)
            self._end(worker, totals, chunks, decoding)

        worker.core.start(self._now, seconds, end)
        self._next(worker.core)

    def _next(self, core: Core) -> None:
        if (found := core.next()) is not None:
            at_s, turn = found
            self._at(at_s, lambda: self._computed(core, turn))

    def _computed(self, core: Core, turn: int) -> None:
        done = core.ended(self._now, turn)
        if done is not None:
            self._next(core)
            done()

    def _end(
        self,
        worker: Worker,
        totals: StepTotals,
        chunks: list[tuple[Request, int]],
        decoding: list[Request],
    ) -> None:
        for request, size in chunks:
            request.computed += size
            request.steps += totals
        for request in decoding:
            request.emitted += 1
            if not totals.prefill_tokens:
                request.decode_steps += totals
            if request.emitted >= request.arrival.output_tokens:
                worker.decoding.remove(request)
                self._finish(request, worker)
        for request, _ in chunks:
            if request.computed == request.uncached:
                worker.prompts.remove(request)
                self._prefilled(request, worker)
        worker.busy = False  # not before: room that is given back here may bring it new work
        self._wake(worker)

    def _prefilled(self, request: Request, worker: Worker) -> None:
        worker.keep(request)
        for block in request.arrival.blocks:
            worker.coming[block] -= 1
            if not worker.coming[block]:
                del worker.coming[block]
        request.first_at, request.emitted = self._now, 1
        assert request.stay is not None
        company = request.stay.end(self._now)
        self.predictor.saw_steps(worker.record, request.steps, company)
        plan = request.plan
        assert plan is not None
        if plan.prefill is None or plan.decode is None:
            self._join(request, worker)
        else:
            tokens = min(request.uncached, CHUNK)
            num_bytes = tokens * 23_040
            seconds = TRANSFER_BASE_S + num_bytes / BYTES_PER_S
            seconds *= self._rng.lognormvariate(0, NOISE)
            self.predictor.saw_transfer(plan.prefill, plan.decode, "", num_bytes, seconds)
            decode = self._workers[plan.decode.worker_id]
            self._at(self._now + seconds, lambda: self._join(request, decode))
        self._unclaim(request, [worker.record.worker_id] if plan.prefill else [])
        self._unclaim(request, [f"{worker.record.worker_id}/prefill"])

    def _join(self, request: Request, worker: Worker) -> None:
        if request.arrival.output_tokens <= 1:
            self._finish(request, worker)
            return
        worker.keep(request)
        worker.decoding.append(request)
        request.stay = self._company.stay(worker.record.worker_id, self._now)
        self._wake(worker)

    def _finish(self, request: Request, worker: Worker) -> None:
        request.ended_at = self._now
        self.predictor.saw_output(request.arrival.output_tokens)
        assert request.stay is not None
        company = request.stay.end(self._now)
        if request.decode_steps.steps:
            self.predictor.saw_steps(worker.record, request.decode_steps, company)
        self._unclaim(request, list(request.claims))
