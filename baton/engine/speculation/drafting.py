"""Which sequences of a batch get a draft, and how long. Plain Python: no torch, no clock.

As many drafted tokens are checked as raise the expected tokens per second of the whole batch
(Liu et al., arXiv 2406.14066): by how often drafts of the sequence were right, and by what steps
of more tokens took. Where drafts do not pay there are none; what would have been drafted is
compared with what is drawn all the same, so that it is noticed when they would.
Drafts come last: they take no block and no token of a step that anybody else wants.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field
from typing import Protocol

from baton.engine.block_manager import BlockManager
from baton.engine.sequence import SampledToken, ScheduledBatch, ScheduledSequence, Sequence
from baton.engine.speculation.estimates import Acceptance, StepTimes

UNKNOWN = -1
"""Stands for a token that is drafted when the step runs."""
_PROBE_EVERY = 128


class Drafter(Protocol):
    """Guesses for one sequence."""

    def propose(self, token_ids: ListOf[int], count: int) -> list[int]: ...


@dataclass
class _Watched:
    """A sequence that decodes. `guess`: what may come next, whether or not it is checked."""

    drafter: Drafter
    acceptance: Acceptance
    guess: list[int] = field(default_factory=list)


class Drafting:
    """The drafts of one scheduler; `longest` bounds each."""

    def __init__(
        self, new_drafter: Callable[[], Drafter], longest: int, times: StepTimes | None = None
    ) -> None:
        self.tokens_drafted = 0
        self.tokens_accepted = 0
        self._new_drafter = new_drafter
        self._longest = longest
        self._times = times or StepTimes()
        self._usual = Acceptance(prior=0.5, memory=256)
        self._watched: dict[int, _Watched] = {}
        self._steps_without = 0

    def add_to(self, batch: ScheduledBatch, blocks: BlockManager, budget: int) -> None:
        """Gives items that decode their drafts, of at most `budget` tokens together."""
        decodes = [item for item in batch.items if _decodes(item)]
        known, self._watched = self._watched, {}
        for item in decodes:
            watched = known.get(item.seq.seq_id) or self._watch()
            room = min(self._longest, longest_draft(item.seq, blocks))
            watched.guess = watched.drafter.propose(item.seq.token_ids, room) if room else []
            self._watched[item.seq.seq_id] = watched
        lengths = self._lengths(decodes, batch.num_tokens, budget)
        for item, length in zip(decodes, lengths, strict=True):
            if length := take_blocks(item.seq, length, blocks):
                item.draft = self._watched[item.seq.seq_id].guess[:length]

    def observe(self, batch: ScheduledBatch, sampled: ListOf[ListOf[SampledToken]]) -> None:
        """Learns from a computed batch, before it is booked."""
        self._times.note(batch.num_tokens, batch.step.end - batch.step.start)
        for item, tokens in zip(batch.items, sampled, strict=True):
            watched = self._watched.get(item.seq.seq_id)
            if watched is None or not tokens:
                continue
            guess = item.draft + watched.guess[len(item.draft) :]
            right, tries = _compare(guess, tokens)
            watched.acceptance.note(right, tries)
            self._usual.note(right, tries)
            self.tokens_drafted += len(item.draft)
            self.tokens_accepted += len(tokens) - 1

    def _watch(self) -> _Watched:
        return _Watched(self._new_drafter(), Acceptance(prior=self._usual.share, memory=16))

    def _lengths(
        self, decodes: ListOf[ScheduledSequence], num_tokens: int, budget: int
    ) -> list[int]:
        watched = [self._watched[item.seq.seq_id] for item in decodes]
        lengths = [0] * len(decodes)
        if not any(each.guess for each in watched) or not self._times.knows(num_tokens):
            return lengths
        chances = [(each.acceptance.share, len(each.guess)) for each in watched]
        places = best_draft(chances, num_tokens, budget, self._times.expected)
        for place in places or self._probe(watched)[:budget]:
            lengths[place] += 1
        return lengths

    def _probe(self, watched: ListOf[_Watched]) -> list[int]:
        """Now and then one draft, where it would not be known otherwise that they pay again."""
        self._steps_without += 1
        unknown = [place for place, each in enumerate(watched) if UNKNOWN in each.guess[:1]]
        if self._steps_without < _PROBE_EVERY or not unknown:
            return []
        self._steps_without = 0
        return unknown[:1] * len(watched[unknown[0]].guess)


def best_draft(
    chances: ListOf[tuple[float, int]],
    num_tokens: int,
    budget: int,
    seconds: Callable[[int], float],
) -> list[int]:
    """Places of the sequences that the drafted tokens of the fastest step belong to. `chances`:
    per sequence that decodes, how likely a drafted token is right, and how many there are;
    `seconds` of a step by its tokens, `num_tokens` without drafts."""
    # The k-th token counts only if those before it are right too.
    ranked = sorted(
        (-(share**k), k, place)
        for place, (share, longest) in enumerate(chances)
        for k in range(1, longest + 1)
    )[: max(budget, 0)]
    expected, best_rate, best = float(len(chances)), len(chances) / seconds(num_tokens), 0
    for count, (chance, _, _) in enumerate(ranked, start=1):
        expected -= chance
        rate = expected / seconds(num_tokens + count)
        if rate > best_rate:
            best_rate, best = rate, count
    return [place for _, _, place in ranked[:best]]


def take_blocks(seq: Sequence, length: int, blocks: BlockManager) -> int:
    """Takes the blocks of `length` drafted tokens after the next one, or of as many as there is
    room for without breaking a pin; how many. The scheduler gives back those that turn out to hold
    nothing."""
    held, start = len(seq.block_table), seq.num_computed_tokens + 1
    room = max(0, blocks.num_available - blocks.num_pinned)
    length = min(length, (held + room) * blocks.block_size - start)
    seq.block_table += blocks.allocate(max(0, blocks.blocks_for(start + length) - held))
    return length


def longest_draft(seq: Sequence, blocks: BlockManager) -> int:
    """Tokens that may be drafted now. The last token of an answer is not, it ends it anyway. The
    newest tokens of a quantized cache are overwritten once they fill a block, so no draft
    reaches the end of one: what is taken back is then always still there."""
    longest = seq.sampling.max_tokens - seq.num_output_tokens - 1
    if blocks.num_tail_blocks:
        size = blocks.block_size
        longest = min(longest, size - 2 - seq.num_computed_tokens % size)
    return max(0, longest)


def _decodes(item: ScheduledSequence) -> bool:
    """Whether one token is fed and one is drawn. What a policy has dropped cannot be taken back."""
    seq = item.seq
    one_choice = len(seq.choices) == 1 and seq.sampling.beam is None and seq.kv_policy.is_full
    return item.samples and item.num_new_tokens == 1 and one_choice


def _compare(guess: Iterable[int], tokens: ListOf[SampledToken]) -> tuple[int, int]:
    """How many guessed tokens were drawn, and how many could be told apart."""
    right = tries = 0
    for guessed, token in zip(guess, tokens, strict=False):
        if guessed == UNKNOWN:
            break
        tries += 1
        if guessed != token.token_id:
            break
        right += 1
    return right, tries
