"""One engine: scheduler, model runner and sampler under one lock.

`step` is the architecture. It runs on one thread; everything else may be called from any
thread, takes the lock for microseconds and never waits for a forward pass: the lock is not
held while the model runs. That is safe because blocks of a batch being computed are freed
only by `postprocess` (see scheduler).
"""

import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch

from baton.engine.accounting import book_step
from baton.engine.block_manager import BlockManager
from baton.engine.sampler import Sampler
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import ScheduledBatch, Sequence, StepOutput

S = TypeVar("S", bound=Scheduler)
T = TypeVar("T")


class Runner(Protocol):
    """Computes a batch: fp32 logits [sampling items, vocab], in batch order."""

    on_layers: Callable[[ScheduledBatch, range], None] | None

    def run(self, batch: ScheduledBatch) -> torch.Tensor: ...


class StepFailed(Exception):
    """The model could not compute a batch; its sequences have been ended."""

    def __init__(self, sequences: list[Sequence]) -> None:
        super().__init__(f"a step of {len(sequences)} sequences failed")
        self.sequences = sequences


class Engine(Generic[S]):
    """Owns the block manager and the scheduler; other threads change them by `apply`."""

    def __init__(
        self, scheduler: S, blocks: BlockManager, runner: Runner, sampler: Sampler
    ) -> None:
        self.scheduler = scheduler
        self.blocks = blocks
        self.version = 0
        """Grows with every change from outside the step; see `wait_for_change`."""
        self._runner = runner
        self._sampler = sampler
        self._changed = threading.Condition()
        self.tokens_generated = 0

    def step(self) -> list[StepOutput] | None:
        """Computes one batch; None when nothing can run now."""
        with self._changed:
            self.blocks.expire_pins(time.monotonic())
            batch = self.scheduler.schedule()
        if batch is None:
            return None
        batch.step.start = time.monotonic()
        for item in batch.items:
            if item.seq.started_at is None:
                item.seq.started_at = batch.step.start
        try:
            sampled = self._sampler.sample(self._runner.run(batch), batch)
        except Exception as error:
            with self._changed:
                raise StepFailed(self.scheduler.fail(batch)) from error
        batch.step.end = time.monotonic()
        with self._changed:
            self.tokens_generated += sum(map(len, sampled))
            book_step(batch, batch.step.end - batch.step.start)
            return self.scheduler.postprocess(batch, sampled)

    def apply(self, change: Callable[[], T]) -> T:
        """Runs a change of scheduler or blocks under the lock and wakes the stepping thread."""
        with self._changed:
            result = change()
            self.version += 1
            self._changed.notify_all()
            return result

    def wait_for_change(self, seen: int) -> None:
        """Sleeps until `version` is beyond `seen`, read before the step that found no work."""
        with self._changed:
            self._changed.wait_for(lambda: self.version != seen)

    def report_layers(self, on_layers: Callable[[ScheduledBatch, range], None]) -> None:
        """Calls it in the stepping thread whenever layers have written the KV of a batch."""
        self._runner.on_layers = on_layers

    def add(self, seq: Sequence, max_uncached: int | None = None) -> None:
        """Raises QueueFull, or PrefixGone when more tokens than that were to be computed for it."""
        self.apply(lambda: self.scheduler.add(seq, max_uncached))

    def end(self, group: int, choice: int | None = None) -> list[Sequence]:
        """Ends the live sequences of a request (or of one choice); which they were."""

        def end_all() -> list[Sequence]:
            found = self.scheduler.find(group, choice)
            for seq in found:
                self.scheduler.end(seq)
            return found

        return self.apply(end_all)
