"""Drafts by a small model: it goes ahead of the target, token by token, with a cache of its own.

Each sequence of the target has a shadow here, which follows it: where the target drew another
token than was drafted, the shadow goes back and computes on from there. It draws with the same
number as the target would at that position, so the more alike the two models are, the more often
both draw the same. Whatever it cannot do (no block, beyond its context) is simply not drafted.
Runs in the engine's thread, outside the scheduler's lock.
"""

from collections.abc import Container
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, replace

from torch import Tensor

from baton.engine.block_manager import BlockManager
from baton.engine.model_runner import ModelRunner, OnLayers
from baton.engine.sampler import Sampler
from baton.engine.sequence import ScheduledBatch, ScheduledSequence, Sequence, SequenceStatus
from baton.engine.speculation.drafting import UNKNOWN

_CHUNK = 512
"""Tokens of one sequence that are computed at once when its shadow begins or comes back."""


class Ahead:
    """The drafter of a scheduler whose drafts are filled in when the step runs."""

    def propose(self, token_ids: ListOf[int], count: int) -> list[int]:
        return [UNKNOWN] * count


@dataclass
class _Shadow:
    target: Sequence
    own: Sequence

    def follow(self) -> None:
        """Makes its tokens the target's; what was computed of them stays."""
        wanted, mine = self.target.token_ids, self.own.token_ids
        same = min(self.own.num_computed_tokens, len(wanted) - 1)
        while same and wanted[:same] != mine[:same]:
            same -= 1
        mine[:] = wanted
        self.own.num_computed_tokens = same


class DraftModel:
    """`blocks`: of its own pool, without prefix cache or window: what lies outside a window is
    seen again when a shadow goes back."""

    def __init__(
        self, runner: ModelRunner, blocks: BlockManager, sampler: Sampler, max_model_len: int
    ) -> None:
        self._runner = runner
        self._blocks = blocks
        self._sampler = sampler
        self._max_model_len = max_model_len
        self._shadows: dict[int, _Shadow] = {}

    def fill(self, batch: ScheduledBatch) -> None:
        """Writes the drafts of a scheduled batch, or takes them out."""
        drafting = {item.seq.seq_id: item for item in batch.items if item.draft}
        self._forget(but=drafting)
        ready: list[tuple[_Shadow, ScheduledSequence]] = []
        for item in drafting.values():
            shadow = self._shadow(item.seq)
            shadow.follow()
            if self._make_room(shadow.own, len(item.draft), drafting):
                ready.append((shadow, item))
            else:
                item.draft.clear()
        self._catch_up([shadow.own for shadow, _ in ready])
        for count in range(max((len(item.draft) for _, item in ready), default=0)):
            mine = [(shadow, item) for shadow, item in ready if len(item.draft) > count]
            for (_, item), token in zip(mine, self._next([s.own for s, _ in mine]), strict=True):
                item.draft[count] = token

    def _shadow(self, seq: Sequence) -> _Shadow:
        shadow = self._shadows.pop(seq.seq_id, None)
        if shadow is None:
            prompt = seq.token_ids[: seq.num_prompt_tokens]
            sampling = replace(seq.sampling, logprobs=None)
            shadow = _Shadow(seq, Sequence(prompt, sampling, choice=seq.choice))
        self._shadows[seq.seq_id] = shadow  # the last used come last
        return shadow

    def _forget(self, but: Container[int]) -> None:
        """Ends the shadows of sequences that run no more."""
        running = SequenceStatus.RUNNING
        for seq_id, shadow in list(self._shadows.items()):
            if seq_id not in but and shadow.target.status is not running:
                self._end(seq_id)

    def _end(self, seq_id: int) -> None:
        self._blocks.release_sequence(self._shadows.pop(seq_id).own)

    def _make_room(self, own: Sequence, length: int, busy: Container[int]) -> bool:
        """Blocks for its tokens and all but the last of its draft; takes those of shadows that
        rest, the longest unused first."""
        num_tokens = len(own.token_ids) + length - 1
        if num_tokens > self._max_model_len:
            return False
        missing = self._blocks.blocks_for(num_tokens) - len(own.block_table)
        for seq_id in [seq_id for seq_id in self._shadows if seq_id not in busy]:
            if missing > self._blocks.num_available:
                self._end(seq_id)
        if missing > self._blocks.num_available:
            return False
        own.block_table += self._blocks.allocate(max(0, missing))
        return True

    def _catch_up(self, shadows: ListOf[Sequence]) -> None:
        """Computes all but their newest tokens, chunk by chunk."""
        for own in shadows:
            while own.num_uncomputed_tokens > _CHUNK:
                self._compute([ScheduledSequence(own, _CHUNK)])

    def _next(self, shadows: ListOf[Sequence]) -> list[int]:
        """Draws one more token of each."""
        items = [ScheduledSequence(own, own.num_uncomputed_tokens) for own in shadows]
        order = sorted(range(len(items)), key=lambda i: items[i].num_new_tokens > 1)
        tokens = [0] * len(items)
        for place, token in zip(order, self._compute([items[i] for i in order]), strict=True):
            tokens[place] = token
        for own, token in zip(shadows, tokens, strict=True):
            own.token_ids.append(token)
        return tokens

    def _compute(self, items: list[ScheduledSequence]) -> list[int]:
        batch = ScheduledBatch(items)
        drawn = self._sampler.sample(self._runner.run(batch), batch)
        for item in items:
            item.seq.num_computed_tokens += item.num_new_tokens
        return [run[0].token_id for run in drawn if run]


class DraftingRunner:
    """A target whose drafts are made by a model just before they are checked."""

    def __init__(self, target: ModelRunner, draft_model: DraftModel) -> None:
        self.on_layers: OnLayers | None = None
        self._target = target
        self._draft_model = draft_model

    def run(self, batch: ScheduledBatch) -> Tensor:
        self._draft_model.fill(batch)
        return self._target.run(batch)
