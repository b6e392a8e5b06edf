"""What a prefill worker's next step computes: prompts only, each held once it is computed."""

from collections.abc import Sequence as ListOf

from baton.engine import policy_blocks
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import (
    Progress,
    SampledToken,
    ScheduledBatch,
    Sequence,
    SequenceStatus,
    StepOutput,
)


class PrefillScheduler(Scheduler):
    """The earliest deadline first; a computed prompt is held until `end` is called."""

    def _fill(self, batch: ScheduledBatch) -> None:
        self._schedule_prefills(batch, self.config.chunk_size)

    def _accept(
        self, seq: Sequence, tokens: ListOf[SampledToken], progress: Progress
    ) -> list[StepOutput]:
        self.running.remove(seq)
        self.held.append(seq)
        seq.status = SequenceStatus.HELD
        policy_blocks.trim(self.blocks, seq)
        return [
            self._output(seq, token, choice, seq.num_output_tokens, progress)
            for choice, token in zip(seq.choices, tokens, strict=True)
        ]
