"""A cluster in virtual time around the router's own placement, predictor and queue.

Only the workers are simulated: prefill by earliest deadline with preemption between chunks and a
prefix cache of least recently used blocks, decode by continuous batching with mixed batches.
Service times are injected (`Speed`), with noise; the predictor learns them as it would in life.
Where workers share cores, those of one core that compute at the same time get equal parts of it.
"""

import heapq
import itertools
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from baton.cluster.load_ledger import Load, LoadLedger
from baton.cluster.workers import KVLayout, Role, WorkerLoad, WorkerRecord
from baton.step_totals import StepTotals, chunk_attention
from router.company import Company, Stay
from router.fair_queue import PATIENCE_S, FairQueue, Ticket
from router.placement import POLICIES, Candidate, NoRoom, Plan, RequestFacts, Rules, place
from router.predictor import Predictor
from router.targets import Targets

CHUNK = 512
LAYOUT = KVLayout("f" * 16, 30, 3, 64, 16, "bfloat16")
NOISE = 0.05
TRANSFER_BASE_S, BYTES_PER_S = 0.002, 1e9


@dataclass(frozen=True)
class Arrival:
    """`blocks`: ids of the prompt's blocks of `block_tokens` tokens; equal ids, equal prefix."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Speed:
    """Seconds per step, per prompt token, per attended token, per sequence and its context."""

    step_s: float
    token_s: float
    attended_s: float
    sequence_s: float
    context_s: float

    def step(self, totals: StepTotals, rng: random.Random) -> StepTotals:
        seconds = (
            self.step_s
            + self.token_s * totals.prefill_tokens
            + self.attended_s * totals.attended_tokens
            + self.sequence_s * totals.decode_tokens
            + self.context_s * totals.context_tokens
        )
        return replace(totals, seconds=seconds * rng.lognormvariate(0, NOISE))


# An 8-billion-parameter model in 16 bits on one data-centre GPU, and a 135-million-parameter
# one on a core of a server CPU.
SPEEDS = {
    "gpu": Speed(0.008, 1.0e-4, 6e-9, 1.0e-4, 4e-8),
    "cpu": Speed(0.020, 3.5e-4, 4e-8, 1.2e-3, 1.5e-6),
}


class Core:
    """Steps that are being computed at the same time, by what is left of each."""

    def __init__(self) -> None:
        self._left: dict[Callable[[], None], float] = {}
        self._since = 0.0
        self._turn = 0

    def start(self, now: float, seconds: float, done: Callable[[], None]) -> None:
        self._advance(now)
        self._left[done] = seconds

    def next(self) -> tuple[float, int] | None:
        """When a step will end if nothing else begins, and the turn that this holds for."""
        self._turn += 1
        if not self._left:
            return None
        return self._since + min(self._left.values()) * len(self._left), self._turn

    def ended(self, now: float, turn: int) -> Callable[[], None] | None:
        """What is to be done then; None when the turn has passed."""
        if turn != self._turn:
            return None
        self._advance(now)
        done = min(self._left, key=self._left.__getitem__)
        del self._left[done]
        return done

    def _advance(self, now: float) -> None:
        for done in self._left:
            self._left[done] -= (now - self._since) / len(self._left)
        self._since = now


@dataclass(eq=False)
class Request:
    arrival: Arrival
    number: int
    plan: Plan | None = None
    uncached: int = 0
    computed: int = 0
    emitted: int = 0
    first_at: float = math.inf
    ended_at: float = math.inf
    due_at: float = math.inf
    claims: dict[str, Load] = field(default_factory=dict)
    stay: Stay | None = None
    steps: StepTotals = field(default_factory=StepTotals)
    decode_steps: StepTotals = field(default_factory=StepTotals)

    def met(self, targets: Targets) -> bool:
        if self.first_at - self.arrival.at_s > targets.ttft_s:
            return False
        rest = max(self.arrival.output_tokens - 1, 1)
        return self.ended_at - self.first_at <= targets.tpot_s * rest


class Worker:
    """One engine: `prompts` to compute, `decoding` sequences, a prefix cache."""

    def __init__(self, record: WorkerRecord, speed: Speed, cache_blocks: int) -> None:
        self.record = record
        self.speed = speed
        self.core = Core()
        self.prompts: list[Request] = []
        self.decoding: list[Request] = []
        self.busy = False
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._cache_blocks = cache_blocks
        self.coming: dict[int, int] = {}

    def cached_tokens(self, request: Request, block_tokens: int, expected: bool) -> int:
        known = 0
        for block in request.arrival.blocks:
            if block not in self._cache and not (expected and block in self.coming):
                break
            known += 1
        return min(known * block_tokens, request.arrival.input_tokens - 1)

    def keep(self, request: Request) -> None:
        for block in request.arrival.blocks:
            self._cache[block] = None
            self._cache.move_to_end(block)
        while len(self._cache) > self._cache_blocks:
            self._cache.popitem(last=False)

    def batch(self) -> tuple[StepTotals, list[tuple[Request, int]], list[Request]]:
        """The next step: its work, chunks of prompts and the sequences that decode."""
        budget, chunks = CHUNK - len(self.decoding), []
        prefilled = attended = 0
        for request in sorted(self.prompts, key=lambda r: (r.due_at, r.number)):
            size = min(request.uncached - request.computed, budget)
            if size <= 0:
                break
            start = request.arrival.input_tokens - request.uncached + request.computed
            chunks.append((request, size))
            prefilled, attended = prefilled + size, attended + chunk_attention(start, size)
            budget -= size
        context = sum(r.arrival.input_tokens + r.emitted for r in self.decoding)
        totals = StepTotals(1, prefilled, attended, len(self.decoding), context)
        return totals, chunks, list(self.decoding)


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


def make_workers(
    prefills: int,
    decodes: int,
    speed: Speed,
    cache_blocks: int,
    seed: int = 0,
    cores: int | None = None,
) -> list[Worker]:
    """Equal workers that have measured themselves, with noise; they take turns on `cores` where
    those are fewer."""
    roles = [Role.PREFILL] * prefills + [Role.DECODE] * decodes
    cores = cores or len(roles)
    rng = random.Random(seed)
    workers = [
        Worker(_record(role, number, _profile(speed, rng), cores), speed, cache_blocks)
        for number, role in enumerate(roles)
    ]
    for number, worker in enumerate(workers):
        worker.core = workers[number % cores].core
    return workers


def _profile(speed: Speed, rng: random.Random) -> tuple[StepTotals, ...]:
    work = [StepTotals(1, size, chunk_attention(0, size)) for size in (16, 64, 256, 512)]
    work += [StepTotals(1, 0, 0, batch, 20 * batch) for batch in (1, 16, 64)]
    work += [StepTotals(1, 0, 0, 1, 520), StepTotals(1, 256, chunk_attention(0, 256), 8, 160)]
    return tuple(speed.step(totals, rng) for totals in work)


def _record(role: Role, number: int, profile: tuple[StepTotals, ...], cores: int) -> WorkerRecord:
    return WorkerRecord(
        worker_id=f"{role}-{number}",
        incarnation="1",
        role=role,
        address=f"host:{number}",
        cores=(number % cores,),
        model="m",
        layout=LAYOUT,
        max_model_len=32_768,
        max_num_seqs=64,
        num_blocks=4096,
        load=WorkerLoad(free_blocks=4096),
        chunk_size=CHUNK,
        profile=profile,
    )
