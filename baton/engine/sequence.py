"""One choice of one request inside the engine, and the batches made of them.

A sequence is its tokens, its block table and how far its KV has been computed. All else
(penalties, seeds, finish) follows from the tokens, so a sequence can be rebuilt anywhere.
Before its first token a request with n > 1 is a single sequence that draws n tokens.
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from baton.block_hash import block_hash, policy_name, root_hash
from baton.engine.sampling_params import SamplingParams
from baton.kv_policy import FULL, KVPolicy
from baton.step_totals import StepTotals

if TYPE_CHECKING:
    from baton.engine.beam_group import BeamGroup

_ids = itertools.count()

NO_BLOCK = -1
"""Stands in a block table for a leading block that was given back: no layer sees it any more."""


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


class SequenceStatus(Enum):
    WAITING = "waiting"
    """In a scheduler's queue; holds no blocks."""
    RUNNING = "running"
    """Scheduled every step; holds the blocks of its table."""
    HELD = "held"
    """Prompt computed, blocks kept for a hand-off; leaves by `release`."""
    ENDED = "ended"
    """Finished or aborted. Its blocks are free, or will be when the running step ends."""


class Sequence:
    """`group` is the id of the request; choices of one request share it. With
    `output_token_ids` and `choice` it is one choice that began elsewhere and goes on here:
    prefill computes its initial tokens, prompt and output alike."""

    def __init__(
        self,
        prompt_token_ids: ListOf[int],
        sampling: SamplingParams,
        *,
        output_token_ids: ListOf[int] = (),
        choice: int | None = None,
        fingerprint: str = "",
        kv_dtype: str = "bfloat16",
        kv_policy: KVPolicy = FULL,
        cache_salt: str = "",
        due_at: float = math.inf,
    ) -> None:
        self.seq_id = next(_ids)
        self.group = self.seq_id
        self.arrival = self.seq_id
        self.token_ids = [*prompt_token_ids, *output_token_ids]
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_initial_tokens = len(self.token_ids)
        self.sampling = sampling
        self.choices: tuple[int, ...] = (
            tuple(range(sampling.num_drawn)) if choice is None else (choice,)
        )
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.due_at = due_at
        """When its first token is wanted, on the clock of its worker; prompts are ordered by it."""
        self.started_at: float | None = None
        """Monotonic clock of this process when its first step began; set by the engine."""
        self.prefill_steps = StepTotals()
        """Steps that it took part in and that computed any prompt; `decode_steps`: the others."""
        self.decode_steps = StepTotals()
        self.block_table: list[int] = []
        self.tail_blocks: list[int] = []
        """Of a quantized cache: where the newest tokens are until they fill a block."""
        self.peer_block_size = 1
        """Tokens per block of the decode worker that a hand-off of it goes to. A whole block there
        is shipped if a window sees any of it, so no part of one is given back before."""
        self.compact_blocks: list[int] = []
        """Where what the policy keeps of the prompt will go; empty once it is there."""
        self.num_computed_tokens = 0
        self.num_dropped_tokens = 0
        """Computed, and not kept: the others lie in the table side by side."""
        self.kv_policy = kv_policy
        self.retention: object | None = None
        """What the model runner keeps of a prompt until the policy has chosen from it."""
        self.num_cached_tokens = 0
        self.num_published_blocks = 0
        self.is_approximate = False
        """Its cache is not what this worker would have computed, so none of it is shared."""
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.recompute_below = 0
        """KV of tokens below this was computed before: computing it again is a recompute."""
        self.beams: BeamGroup | None = None
        """The group of a beam search that it belongs to; set by the scheduler."""
        self._hashes: list[bytes] = []
        self._root = root_hash(fingerprint, policy_name(kv_dtype, str(kv_policy)), cache_salt)

    @property
    def choice(self) -> int:
        return self.choices[0]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_outside_blocks(self) -> int:
        """Leading blocks of the table that were given back."""
        return bisect_right(self.block_table, NO_BLOCK, key=lambda block: min(block, 0))

    @property
    def held_blocks(self) -> list[int]:
        """Every block that it has a reference to; a hand-off names them by place in this list."""
        return self.block_table + self.tail_blocks + self.compact_blocks

    @property
    def num_kept_tokens(self) -> int:
        """Computed tokens in the cache, or before a window; the slot of the next one."""
        return self.num_computed_tokens - self.num_dropped_tokens

    def dropped_of(self, num_tokens: int, block_size: int) -> int:
        """Tokens that its policy does not keep of the first `num_tokens` once computed."""
        return num_tokens - self.kv_policy.kept(num_tokens, self.num_prompt_tokens, block_size)

    @property
    def seen_blocks(self) -> list[int]:
        """The table without the blocks outside every window."""
        return self.block_table[self.num_outside_blocks :]

    def num_seen_tokens(self, block_size: int) -> int:
        """Computed tokens in those blocks."""
        return self.num_kept_tokens - self.num_outside_blocks * block_size

    def num_full_shipped(self, block_size: int) -> int:
        """Full blocks of what a hand-off of the initial tokens ships; they come first."""
        return self._num_shipped_tokens(block_size) // block_size

    def handoff_positions(self, block_size: int, plain: bool = False) -> list[int]:
        """Places in `held_blocks` of what a hand-off of the initial tokens ships: all blocks, or
        the full ones and, if there is a rest, the tail; with the policy's state if it has one.
        `plain`: counted as by a sender whose cache is not quantized."""
        full, rest = divmod(self._num_shipped_tokens(block_size), block_size)
        num_blocks = full + (rest > 0)
        tail = range(num_blocks, num_blocks + len(self.tail_blocks))
        if self.kv_policy.keeps_state:
            return [*range(num_blocks), *tail]
        if plain or not self.tail_blocks:
            return [*range(num_blocks)]
        return [*range(full), *(tail if rest else ())]

    def _num_shipped_tokens(self, block_size: int) -> int:
        return self.num_initial_tokens - self.dropped_of(self.num_initial_tokens, block_size)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    def full_block_hashes(self, block_size: int, num_tokens: int | None = None) -> list[bytes]:
        """Hashes of the full blocks of the first `num_tokens` (default all) tokens; kept."""
        count = (len(self.token_ids) if num_tokens is None else num_tokens) // block_size
        while len(self._hashes) < count:
            start = len(self._hashes) * block_size
            parent = self._hashes[-1] if self._hashes else self._root
            self._hashes.append(block_hash(parent, self.token_ids[start : start + block_size]))
        return self._hashes[:count]

    def fork(self, choice: int) -> "Sequence":
        """A copy for one choice with the same table; the caller takes the references."""
        child = Sequence.__new__(Sequence)
        child.__dict__.update(self.__dict__)
        child.seq_id = next(_ids)
        child.token_ids = list(self.token_ids)
        child.block_table = list(self.block_table)
        child.tail_blocks = list(self.tail_blocks)
        child._hashes = list(self._hashes)
        child.choices = (choice,)
        child.num_preemptions = child.num_recomputed_tokens = 0
        child.prefill_steps, child.decode_steps = StepTotals(), StepTotals()
        return child


@dataclass
class ScheduledSequence:
    """Feeds tokens [num_computed_tokens, num_computed_tokens + num_own_tokens) of `seq`, then
    `draft`: what may follow its newest token, and is checked by this step."""

    seq: Sequence
    num_own_tokens: int
    draft: list[int] = field(default_factory=list)

    @property
    def num_new_tokens(self) -> int:
        return self.num_own_tokens + len(self.draft)

    @property
    def samples(self) -> bool:
        return self.seq.num_computed_tokens + self.num_own_tokens == len(self.seq.token_ids)

    @property
    def new_token_ids(self) -> list[int]:
        start = self.seq.num_computed_tokens
        return self.seq.token_ids[start : start + self.num_own_tokens] + self.draft


@dataclass
class Step:
    """When a batch was computed: monotonic clock of this process, set by the engine."""

    batch_size: int = 0
    start: float = 0.0
    end: float = 0.0


@dataclass
class ScheduledBatch:
    """One step. Decodes (one new token) come first; `block_copies` are (source, target) blocks
    to copy before the forward pass."""

    items: list[ScheduledSequence] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    step: Step = field(default_factory=Step)

    @property
    def num_tokens(self) -> int:
        return sum(item.num_new_tokens for item in self.items)


@dataclass(frozen=True)
class SampledToken:
    """A drawn token. `logprob` and `top` (id, log probability; most likely first) are of the
    model's raw distribution, natural log; None when not asked for."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Progress(NamedTuple):
    """What a step did for one sequence."""

    step: Step
    num_new_tokens: int
    """Without drafted tokens that were not drawn."""
    num_computed_tokens: int
    """Tokens whose KV is complete after the step."""
    num_drafted_tokens: int = 0


@dataclass(frozen=True)
class StepOutput:
    """What one step did for one choice. `token` is None for a prefill chunk that did not reach
    the end of its prompt."""

    seq: Sequence
    token: SampledToken | None = None
    choice: int = 0
    index: int = 0
    """Position of the token in the choice's output."""
    finish_reason: FinishReason | None = None
    progress: Progress | None = None
    """None for an output that no step made."""
