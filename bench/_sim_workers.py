"""Workers of a cluster in virtual time: what they compute, how long that takes, what they cache.

Prefill goes by earliest deadline with preemption between chunks, decode by continuous batching
with mixed batches, and a prefix cache keeps the least recently used blocks. Where workers share
cores, those of one core that compute at the same time get equal parts of it.
"""

import math
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from baton.cluster.load_ledger import Load
from baton.cluster.workers import KVLayout, Role, WorkerLoad, WorkerRecord
from baton.step_totals import StepTotals, chunk_attention
from router.company import Stay
from router.placement import Plan
from router.targets import Targets

CHUNK = 512
LAYOUT = KVLayout("f" * 16, 30, 3, 64, 16, "bfloat16")
NOISE = 0.05


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
