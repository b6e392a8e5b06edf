"""A decode step under H2O: what each cached token has received so far, and who has to go.

The state of a slot, per key-value head, is its score (float32) and the position of the token in it
(int32). It lies in blocks of the cache's own pool, scores in the key plane and positions in the
value plane, so that it is shipped, copied and freed like keys and values. The newest token comes
to the last slot; when the cache is full, it then takes, in each head, the slot of the evicted one.
"""

from collections.abc import Sequence as ListOf
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.kv_stores import KVStore
from baton.engine.ops.retention import received_in_step
from baton.engine.sequence import Sequence
from baton.kv_policy import H2O

Cache = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class HeavyHitters:
    """Sequence i has row `rows[i]` of the batch; its tokens lie in `slots[i, : lengths[i]]` of a
    layer, the newest, at text position `newest[i]`, in the last one. Tokens after `protected[i]`
    stay; `full[i]` says whether one of the others has to go. `states` are the blocks of states."""

    rows: Tensor
    slots: Tensor
    lengths: Tensor
    newest: Tensor
    protected: Tensor
    full: Tensor
    states: Tensor

    @staticmethod
    def of(seqs: ListOf[Sequence], rows: ListOf[int], store: KVStore) -> "HeavyHitters":
        lengths = [seq.num_kept_tokens + 1 for seq in seqs]
        most = max(lengths)
        slots = torch.zeros(len(seqs), most, dtype=torch.long)
        budgets, protected = [], []
        for i, seq in enumerate(seqs):
            slots[i, : lengths[i]] = store.slots(seq.block_table, lengths[i])
            assert isinstance(seq.kv_policy, H2O)
            budgets.append(seq.kv_policy.tokens(seq.num_prompt_tokens))
            newest = seq.kv_policy.newest(seq.num_prompt_tokens)
            protected.append(seq.num_computed_tokens - newest)
        return HeavyHitters(
            torch.tensor(rows),
            slots,
            torch.tensor(lengths),
            torch.tensor([seq.num_computed_tokens for seq in seqs]),
            torch.tensor(protected),
            torch.tensor(lengths) > torch.tensor(budgets),
            torch.tensor([seq.tail_blocks for seq in seqs]),
        )

    @staticmethod
    def begin(states: list[int], cache: Cache, scores: Tensor, places: Tensor) -> None:
        """Of a computed prompt: scores and positions (kv_head, slot) of what is kept."""
        blocks, count = torch.tensor([states]), scores.shape[1]
        kept = _read(cache[1], blocks, len(scores))
        kept[0][0, :, :count], kept[1][0, :, :count] = scores, places.int()
        _write(cache[1], blocks, *kept)

    def after(self, q: Tensor, cache: Cache, scale: float | None, softcap: float | None) -> None:
        """In one layer, once its attention is computed."""
        slots, table = cache
        keys = slots[0, self.slots]
        most, num_kv_heads = keys.shape[1:3]
        last = (self.lengths - 1)[:, None, None].expand(-1, num_kv_heads, 1)
        scores, positions = _read(table, self.states, num_kv_heads)
        scores.scatter_(2, last, 0.0)
        positions.scatter_(2, last, self.newest.int()[:, None, None].expand(-1, num_kv_heads, 1))
        more = received_in_step(q[self.rows], keys, self.lengths, scale, softcap)
        scores[..., :most] += more
        if self.full.any():
            self._evict(slots, scores, positions, most, last)
        _write(table, self.states, scores, positions)

    def _evict(
        self, slots: Tensor, scores: Tensor, positions: Tensor, most: int, last: Tensor
    ) -> None:
        stays = positions[..., :most] > self.protected[:, None, None]
        stays |= torch.arange(most) >= self.lengths[:, None, None]
        evicted = scores[..., :most].masked_fill(stays, float("inf")).argmin(2, keepdim=True)
        evicted = torch.where(self.full[:, None, None], evicted, last)
        for state in (scores, positions):
            state.scatter_(2, evicted, state.gather(2, last))
        heads = torch.arange(slots.shape[2])
        targets = self.slots.gather(1, evicted[..., 0])  # (sequence, kv_head)
        sources = self.slots.gather(1, last[..., 0])
        slots[:, targets, heads] = slots[:, sources, heads]


def _read(table: Tensor, blocks: Tensor, num_kv_heads: int) -> tuple[Tensor, Tensor]:
    """Copies of scores and positions, (sequence, kv_head, slot)."""
    parts = []
    for plane, dtype in ((0, torch.float32), (1, torch.int32)):
        rows = table.index_select(0, blocks.flatten() + plane * (len(table) // 2))
        flat = rows.view(dtype).view(len(blocks), -1, num_kv_heads)
        parts.append(flat.transpose(1, 2).contiguous())
    return parts[0], parts[1]


def _write(table: Tensor, blocks: Tensor, scores: Tensor, positions: Tensor) -> None:
    for plane, state in ((0, scores), (1, positions)):
        rows = blocks.flatten() + plane * (len(table) // 2)
        flat = state.transpose(1, 2).contiguous().view(len(rows), -1)
        table.index_copy_(0, rows, flat.view(table.dtype))
