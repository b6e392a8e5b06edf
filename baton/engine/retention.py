"""The part of a step that evicts: called by each layer once its attention is computed.

Prompts under SnapKV and H2O have their attention observed; what is kept of a complete one is copied
into the sequence's compact blocks. Under H2O a decode step also exchanges, head by head, the token
that has received least for the newest one. Which sequences and blocks these are is fixed for the
step; the layers come in order.
"""

from collections.abc import Iterator
from collections.abc import Sequence as ListOf
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.heavy_hitters import HeavyHitters
from baton.engine.kv_stores import KVStore, Place
from baton.engine.ops.retention import keep, pick, received
from baton.engine.sequence import ScheduledSequence, Sequence
from baton.kv_policy import H2O, SnapKV


@dataclass(frozen=True)
class _Prompt:
    """A chunk of a prompt: its queries are rows [start, end) of the batch."""

    seq: Sequence
    start: int
    end: int

    @property
    def first(self) -> int:
        return self.seq.num_computed_tokens

    @property
    def length(self) -> int:
        return self.first + self.end - self.start


class Retention:
    def __init__(
        self, store: KVStore, prompts: ListOf[_Prompt], heavy: ListOf[HeavyHitters]
    ) -> None:
        self._store = store
        self._prompts = prompts
        self._heavy = heavy

    @staticmethod
    def of(items: ListOf[ScheduledSequence], store: KVStore) -> "Retention | None":
        """None when nothing of the batch is under such a policy."""
        prompts, decodes, end = [], [], 0
        for item in items:
            start, end = end, end + item.num_new_tokens
            seq = item.seq
            if not isinstance(seq.kv_policy, SnapKV | H2O):
                continue
            if seq.num_computed_tokens < seq.num_prompt_tokens:
                if seq.kv_policy.keeps_state or seq.kv_policy.compacts(seq.num_prompt_tokens):
                    prompts.append(_Prompt(seq, start, end))
            elif seq.kv_policy.keeps_state:
                decodes.append((seq, start))
        if not prompts and not decodes:
            return None
        return Retention(store, prompts, list(_heavy_hitters(decodes, store)))

    def after(
        self,
        layer: int,
        q: Tensor,
        cache: tuple[Tensor, Tensor],
        scale: float | None,
        softcap: float | None,
    ) -> None:
        """`q` are the batch's rotated queries, `cache` the layer's (slots, table)."""
        for prompt in self._prompts:
            self._observe(prompt, layer, q, cache, scale, softcap)
        for heavy in self._heavy:
            heavy.after(q, cache, scale, softcap)

    def _observe(
        self,
        prompt: _Prompt,
        layer: int,
        q: Tensor,
        cache: tuple[Tensor, Tensor],
        scale: float | None,
        softcap: float | None,
    ) -> None:
        seq = prompt.seq
        rows, ends = q[prompt.start : prompt.end], prompt.length == seq.num_prompt_tokens
        if isinstance(seq.kv_policy, H2O):
            kv = self._store.read(cache, Place.of(seq), prompt.length)
            scores = received(rows, kv[:, 0], prompt.first, scale, softcap)
            if (before := _kept(seq).get(layer)) is not None:
                scores[:, : before.shape[1]] += before
            _kept(seq)[layer] = scores
        else:
            first = seq.num_prompt_tokens - _newest(seq)
            rows = _with_earlier(seq, layer, rows[max(first - prompt.first, 0) :])
            if not ends:
                return
            # At once, over the cache as decode finds it: chunks then make no difference.
            kv = self._store.read(cache, Place.of(seq), prompt.length)
            scores = received(rows, kv[:, 0], first, scale, softcap)
        if ends:
            self._settle(seq, scores, kv, cache)

    def _settle(
        self, seq: Sequence, scores: Tensor, kv: Tensor, cache: tuple[Tensor, Tensor]
    ) -> None:
        """The prompt is complete in this layer."""
        policy = seq.kv_policy
        assert isinstance(policy, SnapKV | H2O)
        places = torch.arange(scores.shape[1]).expand(len(scores), -1)
        if policy.compacts(seq.num_prompt_tokens):
            kernel = policy.kernel if isinstance(policy, SnapKV) else 1
            places = keep(scores, policy.tokens(seq.num_prompt_tokens), _newest(seq), kernel)
            self._store.write(cache, Place.of_compact(seq), pick(kv, places))
        if isinstance(policy, H2O):
            HeavyHitters.begin(seq.tail_blocks, cache, scores.gather(1, places), places)


def _newest(seq: Sequence) -> int:
    """Tokens that are kept whatever they receive."""
    policy = seq.kv_policy
    assert isinstance(policy, SnapKV | H2O)
    if isinstance(policy, SnapKV):
        return min(policy.window, seq.num_prompt_tokens)
    return policy.newest(seq.num_prompt_tokens)


def _kept(seq: Sequence) -> dict[int, Tensor]:
    """Of the chunks so far, by layer: scores under H2O, the observing queries under SnapKV."""
    if not isinstance(seq.retention, dict):
        seq.retention = {}
    return seq.retention


def _with_earlier(seq: Sequence, layer: int, queries: Tensor) -> Tensor:
    kept = _kept(seq)
    kept[layer] = torch.cat((kept[layer], queries)) if layer in kept else queries.clone()
    return kept[layer]


def _heavy_hitters(decodes: ListOf[tuple[Sequence, int]], store: KVStore) -> Iterator[HeavyHitters]:
    """Sequences whose states take as many blocks are computed together."""
    groups: dict[int, list[tuple[Sequence, int]]] = {}
    for seq, row in decodes:
        groups.setdefault(len(seq.tail_blocks), []).append((seq, row))
    for group in groups.values():
        yield HeavyHitters.of([seq for seq, _ in group], [row for _, row in group], store)
