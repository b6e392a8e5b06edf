"""What a decode worker's next step computes: continuous batching with preemption by recompute.

Every running sequence gets its token each step, what is left of the budget goes to prompts
(mixed batches), and when blocks run out the youngest sequence is preempted and computed again
later.
"""

from bisect import insort
from collections.abc import Sequence as ListOf

from baton.engine.beam_group import accept_beam
from baton.engine.block_manager import BlockManager
from baton.engine.config import EngineConfig
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import (
    Progress,
    SampledToken,
    ScheduledBatch,
    ScheduledSequence,
    Sequence,
    SequenceStatus,
    StepOutput,
)
from baton.engine.speculation.drafting import Drafting


class DecodeScheduler(Scheduler):
    def __init__(self, config: EngineConfig, blocks: BlockManager) -> None:
        super().__init__(config, blocks)
        self.drafting: Drafting | None = None
        """Where set, sequences that decode get drafts."""
        self.num_preemptions = 0
        self.tokens_recomputed = 0
        self.pending_sources: list[int] = []
        """Blocks of the preempted that the running step copies from: held until it is over."""

    def join(self, seqs: ListOf[Sequence]) -> None:
        """Adds sequences whose prompt KV is in their blocks already (a committed hand-off)."""
        for seq in seqs:
            seq.status = SequenceStatus.RUNNING
            self.blocks.publish_computed(seq)
            insort(self.running, seq, key=lambda s: s.arrival)

    def fork(self, seq: Sequence, choices: ListOf[int]) -> list[Sequence]:
        """One sequence per choice on shared blocks; the first one is `seq` itself."""
        children = [seq.fork(choice) for choice in choices[1:]]
        for child in children:
            self.blocks.acquire(child.held_blocks)
        seq.choices = (choices[0],)
        return [seq, *children]

    def _fill(self, batch: ScheduledBatch) -> None:
        self._schedule_decodes(batch)
        self._schedule_prefills(batch, self.config.chunk_size - len(batch.items))
        while not batch.items and self.waiting and self.running:
            # Beams that have been heard hold what another beam of theirs waits for.
            self._preempt(self.running[-1], batch)
            self._schedule_prefills(batch, self.config.chunk_size)
        if self.drafting is not None:
            budget = self.config.chunk_size - batch.num_tokens
            self.drafting.add_to(batch, self.blocks, budget)

    def _schedule_decodes(self, batch: ScheduledBatch) -> None:
        for seq in list(self.running):
            decodes = seq.status is SequenceStatus.RUNNING and seq.num_uncomputed_tokens == 1
            if decodes and self._make_room(seq, batch):
                batch.items.append(ScheduledSequence(seq, 1))

    def _make_room(self, seq: Sequence, batch: ScheduledBatch) -> bool:
        """A writable slot for the next token, preempting from the youngest on; False when
        `seq` itself had to go. Victims come after `seq`, so none is in the batch yet."""
        while not self._slot(seq, batch):
            victim = self.running[-1]
            self._preempt(victim, batch)
            if victim is seq:
                return False
        return True

    def _slot(self, seq: Sequence, batch: ScheduledBatch) -> bool:
        position = seq.num_kept_tokens // self.blocks.block_size
        grows = position == len(seq.block_table)
        written = range(len(seq.block_table)) if seq.kv_policy.keeps_state else (position,)
        shared = [(seq.block_table, i) for i in written if i < len(seq.block_table)]
        shared += [(seq.tail_blocks, i) for i in range(len(seq.tail_blocks))]
        shared = [(table, i) for table, i in shared if self.blocks.is_shared(table[i])]
        if self.blocks.num_available < grows + len(shared):
            return False
        if grows:
            seq.block_table += self.blocks.allocate(1)
        for table, i in shared:
            (own,) = self.blocks.allocate(1)
            batch.block_copies.append((table[i], own))
            self.blocks.release([table[i]])
            table[i] = own
        return True

    def _preempt(self, seq: Sequence, batch: ScheduledBatch) -> None:
        self.running.remove(seq)
        self._keep_sources(seq, batch)
        self.blocks.release_sequence(seq)
        parked = not seq.num_uncomputed_tokens  # a beam that has been heard: idle until it grows
        seq.recompute_below = max(seq.recompute_below, seq.num_computed_tokens)
        seq.num_computed_tokens = seq.num_dropped_tokens = 0
        seq.retention = None
        seq.num_published_blocks = 0
        seq.num_preemptions += 1
        self.num_preemptions += 1
        if parked:
            seq.status = SequenceStatus.HELD
            self.held.append(seq)
        else:
            seq.status = SequenceStatus.WAITING
            insort(self.waiting, seq, key=lambda s: s.arrival)

    def _keep_sources(self, seq: Sequence, batch: ScheduledBatch) -> None:
        """The lock is let go before the copies are made: a source that is free by then could be
        written by a hand-off. Whoever else holds one is in the batch or a victim yet to come; a
        second reference would only make it copy too."""
        sources = {source for source, _ in batch.block_copies}
        last = [b for b in seq.held_blocks if b in sources and not self.blocks.is_shared(b)]
        self.blocks.acquire(last)
        self.pending_sources += last

    def _release_sources(self) -> None:
        self.blocks.release(self.pending_sources)
        self.pending_sources = []

    def _may_start(self, seq: Sequence, num_new_blocks: int, reused: list[int]) -> bool:
        """A preempted sequence comes back only when all running ones can still grow, or it
        would be thrown out again at once."""
        spare = len(self.running) + 1 if seq.num_preemptions and self.running else 0
        return self.blocks.can_take(num_new_blocks + spare, reused)

    def postprocess(
        self, batch: ScheduledBatch, sampled: ListOf[ListOf[SampledToken]]
    ) -> list[StepOutput]:
        self._release_sources()
        if self.drafting is not None:
            self.drafting.observe(batch, sampled)
        return super().postprocess(batch, sampled)

    def fail(self, batch: ScheduledBatch) -> list[Sequence]:
        self._release_sources()
        return super().fail(batch)

    def _advance(self, item: ScheduledSequence, tokens: ListOf[SampledToken]) -> None:
        before = item.seq.num_recomputed_tokens
        super()._advance(item, tokens)
        self.tokens_recomputed += item.seq.num_recomputed_tokens - before

    def _accept(
        self, seq: Sequence, tokens: ListOf[SampledToken], progress: Progress
    ) -> list[StepOutput]:
        if seq.sampling.beam is not None:
            return [StepOutput(seq, progress=progress), *accept_beam(self, seq, tokens[0])]
        if len(seq.choices) == 1:
            return self._append(seq, tokens, progress)
        outputs = []
        for choice_seq, token in zip(self.fork(seq, seq.choices), tokens, strict=True):
            if choice_seq is not seq:
                insort(self.running, choice_seq, key=lambda s: s.arrival)
            outputs += self._append(choice_seq, [token], progress)
        return outputs

    def _append(
        self, seq: Sequence, tokens: ListOf[SampledToken], progress: Progress
    ) -> list[StepOutput]:
        """All but the last of `tokens` were drafted and are in the sequence already."""
        first = seq.num_output_tokens - len(tokens) + 1
        seq.token_ids.append(tokens[-1].token_id)
        outputs = [
            self._output(seq, token, seq.choice, index, progress)
            for index, token in enumerate(tokens, start=first)
        ]
        seq.finish_reason = outputs[-1].finish_reason
        if seq.finish_reason:
            self.end(seq)
        return outputs
