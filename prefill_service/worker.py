"""The work of one prefill request, from queue to committed hand-off. Knows no protobuf.

The engine computes on its own thread; this follows a prompt through its chunks, lets the
hand-off ship what is complete, and shows the first tokens before the KV has landed.
"""

import contextlib
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field

from baton.engine.async_engine import AsyncEngine, Stream
from baton.engine.kv_layout import KVLayout
from baton.engine.policy_blocks import refusal
from baton.engine.prefill_scheduler import PrefillScheduler
from baton.engine.sampling_params import SamplingParams
from baton.engine.sequence import Progress, ScheduledBatch, Sequence, StepOutput
from baton.engine.transfer.base import KVSender
from baton.step_totals import StepTotals
from baton.worker.activity import Activity
from baton.worker.prompt_cache import PinTerms, add_pinned
from prefill_service.handoff import Handoff


@dataclass(frozen=True)
class Started:
    """Times here and below are on this process's monotonic clock."""

    num_cached_tokens: int
    received_at: float
    started_at: float


@dataclass(frozen=True)
class Firsts:
    """The first token of every choice, and the steps that computed the prompt."""

    outputs: tuple[StepOutput, ...]
    chunks: tuple[Progress, ...]


@dataclass(frozen=True)
class Done:
    num_computed_tokens: int
    compute_s: float
    transfer_s: float
    bytes_sent: int
    blocks_sent: int
    finished: bool
    transport: str
    transfers: tuple[tuple[float, float], ...]
    totals: StepTotals
    exposed_bytes: int


@dataclass(frozen=True)
class PrefillJob:
    """`open_sender` is None when the request ends on its first token by its own limits."""

    prompt: list[int]
    sampling: SamplingParams
    cache_salt: str = ""
    kv_policy: str = ""
    output: list[int] = field(default_factory=list)
    choice: int | None = None
    """With `output`: one choice that goes on here."""
    due_at: float = math.inf
    """When the first token is wanted, by this process's monotonic clock."""
    pins: tuple[PinTerms, ...] = ()
    open_sender: Callable[[Sequence], KVSender] | None = None


Event = Started | Firsts | Done


class PrefillWorker:
    def __init__(
        self, engine: AsyncEngine[PrefillScheduler], layout: KVLayout, activity: Activity
    ) -> None:
        self._engine = engine
        self._layout = layout
        self._activity = activity
        self._handoffs: dict[int, Handoff] = {}
        """By sequence."""
        engine.engine.report_layers(self._layers_done)

    async def prefill(self, job: PrefillJob) -> AsyncGenerator[Event, None]:
        """Started, the first token of every choice, Done. Closing it gives everything back.

        Raises QueueFull, Draining, HandoffError, EngineFailed, or ValueError when the prompt
        can never fit."""
        seq = self._sequence(job)
        with self._activity.request(), self._engine.stream(seq.group) as stream:
            queued = time.monotonic()
            async with self._handoff(job, seq) as handoff:
                add_pinned(self._engine.engine, seq, job.pins)  # now its layers may be reported
                step = await stream.next()
                started = queued if seq.started_at is None else seq.started_at
                yield Started(seq.num_cached_tokens, queued, started)
                firsts = await self._follow(stream, step, handoff)
                first_at = time.monotonic()
                hidden_bytes = handoff.sender.bytes_sent if handoff else 0
                yield firsts
                finished = all(output.finish_reason for output in firsts.outputs)
                if handoff and not finished:
                    await handoff.complete(firsts.outputs)
            yield Done(
                num_computed_tokens=seq.num_initial_tokens - seq.num_cached_tokens,
                compute_s=first_at - started,
                transfer_s=time.monotonic() - first_at,
                bytes_sent=handoff.sender.bytes_sent if handoff else 0,
                blocks_sent=handoff.blocks_sent if handoff else 0,
                finished=finished,
                transport=handoff.sender.transport if handoff else "",
                transfers=tuple(handoff.transfers) if handoff else (),
                totals=seq.prefill_steps,
                # Fewer in all than then, when what was to be shared memory goes encoded.
                exposed_bytes=max(0, handoff.sender.bytes_sent - hidden_bytes) if handoff else 0,
            )

    def _sequence(self, job: PrefillJob) -> Sequence:
        config = self._engine.engine.scheduler.config
        policy = config.policy(job.kv_policy)
        num_tokens = len(job.prompt) + len(job.output)
        if reason := refusal(config, policy, len(job.prompt), num_tokens):
            raise ValueError(f"the prompt can never fit this worker: {reason}")
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

    async def _follow(
        self,
        stream: Stream,
        outputs: list[StepOutput],
        handoff: Handoff | None,
    ) -> Firsts:
        """Through the chunks, until a step yields the first tokens."""
        chunks = []
        while True:
            if (progress := outputs[0].progress) is not None:
                chunks.append(progress)
                if handoff and outputs[0].token is None:
                    handoff.advance(progress.num_computed_tokens)
            if outputs[0].token is not None:
                return Firsts(tuple(outputs), tuple(chunks))
            outputs = await stream.next()

    def _layers_done(self, batch: ScheduledBatch, layers: range) -> None:
        """In the engine's thread: KV leaves while later layers are computed."""
        for item in batch.items:
            handoff = self._handoffs.get(item.seq.seq_id)
            if handoff is not None:
                num_tokens = item.seq.num_computed_tokens + item.num_new_tokens
                self._engine.call(handoff.advance, num_tokens, layers)

    @contextlib.asynccontextmanager
    async def _handoff(self, job: PrefillJob, seq: Sequence) -> AsyncIterator[Handoff | None]:
        if job.open_sender is None:
            yield None
            return
        handoff = Handoff(job.open_sender(seq), self._layout.num_layers, seq)
        self._activity.transfers.in_flight += 1
        self._handoffs[seq.seq_id] = handoff
        try:
            yield handoff
        finally:
            del self._handoffs[seq.seq_id]
            try:
                await handoff.stop()
            finally:  # also when a second cancellation meets the first one's cleaning up
                self._count(handoff)

    def _count(self, handoff: Handoff) -> None:
        transfers, sender = self._activity.transfers, handoff.sender
        transfers.in_flight -= 1
        transfers.handoffs += handoff.committed
        transfers.handoffs_failed += sender.num_frames > 0 and not handoff.committed
        transfers.blocks += handoff.blocks_sent
        transfers.bytes += sender.bytes_sent
