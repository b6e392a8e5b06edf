"""The work of one decode request: reserve, wait for the KV, stream tokens. Knows no protobuf.

The same engine computes what arrives by hand-off, prompts it prefills itself and what it
preempted: one mixed batch per step.
"""

import asyncio
import hmac
import math
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace

from baton.engine.async_engine import AsyncEngine
from baton.engine.decode_scheduler import DecodeScheduler
from baton.engine.kv_cache import KVCache
from baton.engine.policy_blocks import refusal
from baton.engine.sampling_params import SamplingParams
from baton.engine.sequence import FinishReason, Progress, Sequence, StepOutput
from baton.engine.transfer.base import HandoffRefused
from baton.step_totals import StepTotals
from baton.worker.activity import Activity
from baton.worker.faults import LeaseExpired
from baton.worker.prompt_cache import PinTerms, add_pinned, pin_prompt
from decode_service.incoming import IncomingHandoff
from decode_service.reservations import Reservation, Reservations


@dataclass(frozen=True)
class GenerateJob:
    prompt: list[int]
    sampling: SamplingParams
    cache_salt: str = ""
    kv_policy: str = ""
    prefill_here: bool = False
    max_uncached: int | None = None
    output: list[int] = field(default_factory=list)
    choice: int | None = None
    """With `output`: one choice that goes on here."""
    due_at: float = math.inf
    """When the first token is wanted, by this process's monotonic clock."""
    pins: tuple[PinTerms, ...] = ()


@dataclass(frozen=True)
class Reserved:
    id: str
    secret: bytes
    held_blocks: tuple[int, ...]
    lease_s: float
    received_at: float
    """This and `ready_at`: monotonic clock of this process."""


@dataclass(frozen=True)
class Stepped:
    """What one step drew; `ready_at`, in the first one, is when the request could be scheduled."""

    outputs: list[StepOutput]
    progress: Progress | None
    ready_at: float | None = None


@dataclass(frozen=True)
class Done:
    num_cached_tokens: int
    num_recomputed_tokens: int
    num_preemptions: int
    handoff_s: float
    decode_s: float
    prefill_steps: StepTotals
    decode_steps: StepTotals
    queue_s: float


Event = Reserved | Stepped | Done


class _Lease:
    """Expires unless renewed; `wait` returns when `done` is set."""

    def __init__(self, lease_s: float) -> None:
        self.done = asyncio.Event()
        self._lease_s = lease_s
        self.renew()

    def renew(self) -> None:
        self._deadline = time.monotonic() + self._lease_s

    async def wait(self) -> None:
        while not self.done.is_set():
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise LeaseExpired(f"no hand-off was committed within {self._lease_s} s")
            try:
                async with asyncio.timeout(left):
                    await self.done.wait()
            except TimeoutError:
                continue  # it may have been renewed meanwhile


class _Tally:
    """What one request has come to: which choices have ended, times, recomputes."""

    def __init__(self, choices: tuple[int, ...]) -> None:
        self._left = set(choices)
        self._seqs: dict[int, Sequence] = {}
        self._reserved_at = self.began_at = time.monotonic()
        self._queue_s = 0.0

    @property
    def all_ended(self) -> bool:
        return not self._left

    def begin(self, reservation: Reservation | None) -> None:
        """Decoding begins; choices that ended on prefill's token are over already."""
        self.began_at = time.monotonic()
        if reservation is not None:
            self._left -= {f.choice for f in reservation.first_tokens if f.finish_reason}

    def add(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            if not self._seqs and output.seq.started_at is not None:
                self._queue_s = output.seq.started_at - self._reserved_at
            self._seqs[output.seq.seq_id] = output.seq
            if output.finish_reason is not None:
                self._left.discard(output.choice)

    def done(self, prefilled_here: bool) -> Done:
        seqs = self._seqs.values()
        # Choices of one request run side by side: the longest one saw every step.
        longest = max(seqs, key=_num_steps, default=None)
        return Done(
            num_cached_tokens=max((s.num_cached_tokens for s in seqs if prefilled_here), default=0),
            num_recomputed_tokens=sum(s.num_recomputed_tokens for s in seqs),
            num_preemptions=sum(s.num_preemptions for s in seqs),
            handoff_s=self.began_at - self._reserved_at,
            decode_s=time.monotonic() - self.began_at,
            prefill_steps=longest.prefill_steps if longest else StepTotals(),
            decode_steps=longest.decode_steps if longest else StepTotals(),
            queue_s=self._queue_s if prefilled_here else 0.0,
        )


def _num_steps(seq: Sequence) -> int:
    return seq.prefill_steps.steps + seq.decode_steps.steps


class DecodeWorker:
    def __init__(
        self,
        engine: AsyncEngine[DecodeScheduler],
        cache: KVCache,
        activity: Activity,
        lease_s: float,
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._activity = activity
        self._lease_s = lease_s
        self._reservations = Reservations(engine.engine)
        self._groups: dict[str, tuple[int, bytes]] = {}

    async def generate(self, job: GenerateJob) -> AsyncGenerator[Event, None]:
        """Reserved, then Stepped by step, then Done. Closing it gives everything back.

        Raises NoFreeBlocks, QueueFull, PrefixGone, Draining, LeaseExpired, EngineFailed, or
        ValueError when the request can never fit."""
        with self._activity.request():
            seq = self._sequence(job)
            tally = _Tally(tuple(range(job.sampling.n)) if job.sampling.beam else seq.choices)
            with self._engine.stream(seq.group) as stream, self._admit(seq, job) as admitted:
                reserved, lease, reservation = admitted
                yield reserved
                await lease.wait()
                tally.begin(reservation)
                if reservation is not None and job.sampling.beam is not None:
                    self._engine.publish(self._reservations.start_beams(reservation))
                ready_at = reserved.received_at if reservation is None else reservation.committed_at
                while not tally.all_ended:
                    outputs = await stream.next()
                    tally.add(outputs)
                    drawn = [output for output in outputs if output.token is not None]
                    yield Stepped(drawn, outputs[0].progress, ready_at)
                    ready_at = None
            yield tally.done(job.prefill_here)

    def _sequence(self, job: GenerateJob) -> Sequence:
        config = self._engine.engine.scheduler.config
        policy = config.policy(job.kv_policy)
        longest = len(job.prompt) + job.sampling.max_tokens
        if reason := refusal(config, policy, len(job.prompt), longest):
            raise ValueError(
                f"prompt ({len(job.prompt)}) plus max_tokens ({job.sampling.max_tokens}) can "
                f"never fit this worker: {reason}"
            )
        return Sequence(
            job.prompt,
            job.sampling,
            output_token_ids=job.output,
            choice=job.choice,
            fingerprint=config.fingerprint,
            kv_dtype=config.kv_dtype,
            kv_policy=policy,
            cache_salt=job.cache_salt,
            due_at=job.due_at,
        )

    def reservation(self, reservation_id: str, secret: bytes) -> Reservation:
        """Raises HandoffRefused to who does not know the secret."""
        return self._reservations.find(reservation_id, secret)

    def stop_choice(self, reservation_id: str, secret: bytes, choice: int) -> bool:
        """Ends one choice; False when it has ended already or was never known to the caller."""
        group, wanted = self._groups.get(reservation_id, (0, b""))
        if not wanted or not hmac.compare_digest(wanted, secret):
            return False
        ended = self._engine.engine.end(group, choice)
        self._engine.publish(
            [StepOutput(seq, choice=choice, finish_reason=FinishReason.STOP) for seq in ended]
        )
        return bool(ended)

    @asynccontextmanager
    async def receive(
        self, reservation: Reservation, generation: int, dtype: str, block_size: int
    ) -> AsyncIterator[IncomingHandoff]:
        """One incoming hand-off of KV of `dtype` in blocks of `block_size` tokens; leaving without
        commit aborts it. Raises HandoffRefused."""
        await self._reservations.fence(reservation, generation)
        self._reservations.open(reservation, generation)
        source = replace(self._cache.layout, dtype=dtype, block_size=block_size)
        try:
            handoff = IncomingHandoff(self._reservations, reservation, self._cache, source)
        except BaseException:
            self._reservations.abort(reservation)
            raise
        task, told_to_end = asyncio.current_task(), False

        def end() -> None:
            nonlocal told_to_end
            if task is not None and not told_to_end:
                told_to_end = task.cancel()

        reservation.end_receiving = end
        try:
            yield handoff
        except asyncio.CancelledError:
            if task is None or not told_to_end:
                raise
            # Our own doing: the sender gets an answer, not a call that never ends.
            task.uncancel()
            raise HandoffRefused("the request has ended or a newer attempt has begun") from None
        finally:
            handoff.abort()
            transfers = self._activity.transfers
            transfers.handoffs += handoff.committed
            transfers.handoffs_failed += not handoff.committed
            transfers.blocks += handoff.blocks_received
            transfers.bytes += handoff.bytes_received

    @contextmanager
    def _admit(
        self, seq: Sequence, job: GenerateJob
    ) -> Iterator[tuple[Reserved, _Lease, Reservation | None]]:
        """Room for the request, until the context closes."""
        received_at = time.monotonic()
        lease = _Lease(self._lease_s)
        if job.prefill_here:
            add_pinned(self._engine.engine, seq, job.pins, job.max_uncached)
            lease.done.set()
            name, secret = secrets.token_hex(16), secrets.token_bytes(16)
            with self._named(name, secret, seq):
                yield Reserved(name, secret, (), 0.0, received_at), lease, None
            return
        reservation = self._reservations.reserve(seq)
        reservation.on_committed = lease.done.set
        reservation.on_frame = lease.renew
        held, secret = tuple(range(reservation.num_held)), reservation.secret
        self._activity.transfers.in_flight += 1
        try:
            pin_prompt(self._engine.engine, seq, job.pins)
            with self._named(reservation.id, secret, seq):
                reserved = Reserved(reservation.id, secret, held, self._lease_s, received_at)
                yield reserved, lease, reservation
        finally:
            self._activity.transfers.in_flight -= 1
            self._reservations.cancel(reservation)

    @contextmanager
    def _named(self, name: str, secret: bytes, seq: Sequence) -> Iterator[None]:
        self._groups[name] = seq.group, secret
        try:
            yield
        finally:
            del self._groups[name]
