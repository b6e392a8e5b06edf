"""What the next step computes. Plain Python: no torch, no I/O, no clock.

Schedulers form ragged batches of chunks under one token budget, the prompt with the earliest
deadline first. `Scheduler` is what `PrefillScheduler` and `DecodeScheduler` share.

The caller serialises calls. Between `schedule` and `postprocess` the batch is being
computed: blocks of its sequences, and those it copies from, are not freed then, however they
end; `postprocess` or `fail` does.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as ListOf
from itertools import islice

from baton.block_hash import common_blocks
from baton.engine import policy_blocks
from baton.engine.block_manager import BlockManager
from baton.engine.config import EngineConfig
from baton.engine.finish import finish_reason
from baton.engine.sequence import (
    Progress,
    SampledToken,
    ScheduledBatch,
    ScheduledSequence,
    Sequence,
    SequenceStatus,
    StepOutput,
)

NUM_NEXT = 8
"""Waiting prompts that a newcomer is compared with: a long queue is not hashed under a lock."""


class QueueFull(Exception):
    """The waiting queue has reached its bound."""


class PrefixGone(Exception):
    """A prompt was sent here for what was cached of it: rather than compute it at length beside
    those who decode, somebody else is to be asked."""


class Scheduler:
    """The shared part: queues, admission of prompts, chunking, abort."""

    def __init__(self, config: EngineConfig, blocks: BlockManager) -> None:
        self.config = config
        self.blocks = blocks
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of arrival
        self.held: list[Sequence] = []
        self.num_promised_seqs = 0
        self.prefill_tokens_computed = 0
        self.prefill_tokens_cached = 0
        self._in_step: set[int] = set()

    def add(self, seq: Sequence, max_uncached: int | None = None) -> None:
        if len(self.waiting) >= self.config.max_queue:
            raise QueueFull(f"{len(self.waiting)} sequences are waiting, the bound")
        if max_uncached is not None and (left := self._num_left(seq)) > max_uncached:
            raise PrefixGone(f"{left} tokens of the prompt are not cached, {max_uncached} may be")
        self.waiting.append(seq)

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def sequences(self) -> Iterator[Sequence]:
        yield from self.waiting
        yield from self.running
        yield from self.held

    def find(self, group: int, choice: int | None = None) -> list[Sequence]:
        """Live sequences of a request; with `choice` only the one that draws just that."""
        return [
            seq
            for seq in self.sequences()
            if seq.group == group and (choice is None or seq.choices == (choice,))
        ]

    def end(self, seq: Sequence) -> None:
        """Takes a live sequence out, aborted or released; gives its blocks back."""
        queue = {
            SequenceStatus.WAITING: self.waiting,
            SequenceStatus.RUNNING: self.running,
            SequenceStatus.HELD: self.held,
        }.get(seq.status)
        if queue is None:
            return
        queue.remove(seq)
        seq.status = SequenceStatus.ENDED
        if seq.seq_id not in self._in_step:
            self.blocks.release_sequence(seq)

    def schedule(self) -> ScheduledBatch | None:
        """The next batch, or None when nothing can run."""
        batch = ScheduledBatch()
        self._fill(batch)
        batch.items.sort(key=lambda item: item.num_new_tokens > 1)  # decodes first; stable
        batch.step.batch_size = len(batch.items)
        self._in_step = {item.seq.seq_id for item in batch.items}
        return batch if batch.items else None

    def postprocess(
        self, batch: ScheduledBatch, sampled: ListOf[ListOf[SampledToken]]
    ) -> list[StepOutput]:
        """Books a computed batch. `sampled[i]` has one token per choice of item i, or none; for
        an item with a draft, the drafted tokens that were drawn and one more."""
        self._in_step = set()
        outputs: list[StepOutput] = []
        for item, tokens in zip(batch.items, sampled, strict=True):
            if item.seq.status is SequenceStatus.ENDED:
                self.blocks.release_sequence(item.seq)
                continue
            before = item.seq.num_computed_tokens
            self._advance(item, tokens)
            computed = item.seq.num_computed_tokens
            progress = Progress(batch.step, computed - before, computed, len(item.draft))
            if tokens:
                outputs += self._accept(item.seq, tokens, progress)
            else:
                outputs.append(StepOutput(item.seq, progress=progress))
        return outputs

    def fail(self, batch: ScheduledBatch) -> list[Sequence]:
        """Ends the sequences of a batch that could not be computed."""
        self._in_step = set()
        failed = [item.seq for item in batch.items]
        for seq in failed:
            if seq.status is SequenceStatus.ENDED:
                self.blocks.release_sequence(seq)
            self.end(seq)
        return failed

    # --- for the two schedulers -------------------------------------------------------------

    def _fill(self, batch: ScheduledBatch) -> None:
        raise NotImplementedError

    def _accept(
        self, seq: Sequence, tokens: ListOf[SampledToken], progress: Progress
    ) -> list[StepOutput]:
        raise NotImplementedError

    def _may_start(self, seq: Sequence, num_new_blocks: int, reused: list[int]) -> bool:
        return self.blocks.can_take(num_new_blocks, reused)

    def _schedule_prefills(self, batch: ScheduledBatch, budget: int) -> None:
        """Chunks of prompts, started or not, the most urgent first: a step is the longest that
        a more urgent one waits for. A prompt whose next block another one computes waits for
        it, and that one moves up to its place: nothing is computed twice."""
        scheduled = {item.seq.seq_id for item in batch.items}
        prompts = [
            seq for seq in self.running if seq.num_uncomputed_tokens and seq.seq_id not in scheduled
        ]
        out_of_room = False
        for seq in sorted([*prompts, *self.waiting], key=_urgency):
            if budget <= 0:
                return
            if seq.status is SequenceStatus.WAITING:
                if out_of_room:
                    continue
                if (ahead := self._computing_for(seq, prompts)) is not None:
                    seq = ahead
                elif self._start(seq):
                    self.waiting.remove(seq)
                    prompts.append(seq)
                else:
                    out_of_room = True  # whoever comes later does not take its blocks
                    continue
            if seq.seq_id not in scheduled:
                scheduled.add(seq.seq_id)
                budget -= self._chunk(seq, batch, budget)

    def _num_left(self, seq: Sequence) -> int:
        """Tokens of a newcomer that are neither cached nor being computed for one of the next
        prompts; what they are hashed for here they would be hashed for anyway."""
        size, tokens = self.blocks.block_size, len(seq.token_ids)
        known = len(self.blocks.reusable_prefix(seq))
        if self.blocks.next_missing(seq) is not None:
            wanted = seq.full_block_hashes(size, tokens)
            for other in (*self.running, *islice(self.waiting, NUM_NEXT)):
                if other.num_computed_tokens < other.num_initial_tokens:
                    coming = other.full_block_hashes(size, other.num_initial_tokens)
                    known = max(known, common_blocks(wanted, coming))
        return max(tokens - known * size, 1)

    def _computing_for(self, seq: Sequence, prompts: ListOf[Sequence]) -> Sequence | None:
        """A started prompt that will have computed the next block that `seq` lacks."""
        if not prompts or (missing := self.blocks.next_missing(seq)) is None:
            return None
        position, wanted = missing
        size = self.blocks.block_size
        for other in prompts:
            if other.num_initial_tokens >= (position + 1) * size > other.num_computed_tokens:
                hashes = other.full_block_hashes(size, (position + 1) * size)
                if hashes[position] == wanted:
                    return other
        return None

    def _chunk(self, seq: Sequence, batch: ScheduledBatch, budget: int) -> int:
        start = seq.num_computed_tokens
        end = min(len(seq.token_ids), start + budget)
        if not seq.kv_policy.is_full:
            end = min(end, policy_blocks.step_end(self.config, self.blocks, seq, end))
        if end > start:
            batch.items.append(ScheduledSequence(seq, end - start))
        return end - start

    def _start(self, seq: Sequence) -> bool:
        """Gives a waiting sequence the blocks of all its tokens, cached ones where known."""
        slots = self.num_promised_seqs + sum(len(s.choices) for s in self.running)
        if self.running and slots + len(seq.choices) > self.config.max_num_seqs:
            return False
        reused = self.blocks.reusable_prefix(seq)
        need = policy_blocks.need(self.config, seq, len(seq.token_ids))
        if not self._may_start(seq, need.total - len(reused), reused):
            return False
        self.blocks.reuse(reused)
        seq.tail_blocks = self.blocks.allocate(need.tail)
        seq.block_table = reused + self.blocks.allocate(need.table - len(reused))
        seq.compact_blocks = self.blocks.allocate(need.compact)
        seq.num_computed_tokens = len(reused) * self.blocks.block_size
        seq.num_published_blocks = len(reused)
        if not seq.num_preemptions:
            seq.num_cached_tokens = seq.num_computed_tokens
            self.prefill_tokens_cached += seq.num_cached_tokens
        seq.status = SequenceStatus.RUNNING
        insort(self.running, seq, key=lambda s: s.arrival)
        return True

    def _advance(self, item: ScheduledSequence, tokens: ListOf[SampledToken]) -> None:
        seq, start = item.seq, item.seq.num_computed_tokens
        seq.num_computed_tokens += item.num_own_tokens
        if item.draft:
            right = [token.token_id for token in tokens[:-1]]  # their KV is there: they were fed
            seq.token_ids += right
            seq.num_computed_tokens += len(right)
        if tokens and seq.kv_policy.is_full:
            # Blocks of drafted tokens that were not drawn: nobody else has them, since only blocks
            # of computed tokens are published or shared.
            policy_blocks.trim(self.blocks, seq)
        again = max(0, min(seq.num_computed_tokens, seq.recompute_below) - start)
        seq.num_recomputed_tokens += again
        prompt = max(0, min(seq.num_computed_tokens, seq.num_initial_tokens) - start)
        self.prefill_tokens_computed += max(0, prompt - again)
        self.blocks.publish_computed(seq)
        self.blocks.give_back_outside(seq)
        if not seq.kv_policy.is_full:
            policy_blocks.drop(self.blocks, seq)

    def _output(
        self, seq: Sequence, token: SampledToken, choice: int, index: int, progress: Progress
    ) -> StepOutput:
        reason = None
        if seq.sampling.beam is None:
            eos = self.config.eos_token_ids
            reason = finish_reason(token.token_id, index + 1, seq.sampling, eos)
        return StepOutput(seq, token, choice, index, reason, progress)


def _urgency(seq: Sequence) -> tuple[bool, float, int]:
    """What was preempted comes back first, then the earliest deadline, then the first come."""
    return not seq.num_preemptions, seq.due_at, seq.arrival
