"""Attention over a quantized cache whose newest tokens are still in full precision.

A token sees the group (block) it is in as it was computed, and the groups before it quantized.
That depends on its position alone, so chunks, batches and preemption change nothing. The newest
group of a sequence, its tail, lies in blocks of its own until it is full. Everything is
computed in float32.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.kv.codec import BlockCodec
from baton.engine.ops.attention import Window, attend
from baton.engine.ops.sinks import SinkView


@dataclass(frozen=True)
class TailStore:
    """How a tail (slot, key|value, kv_head, head_dim) of `dtype` lies in rows of a table."""

    codec: BlockCodec
    dtype: torch.dtype

    def read(self, table: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the rows (sequence, row), and the tails that they hold as a view of them."""
        s = self.codec.sizes
        picked = table.index_select(0, rows.flatten()).view(len(rows), -1)
        size = s.block_size * 2 * s.num_kv_heads * s.head_dim * self.dtype.itemsize
        shape = (len(rows), s.block_size, 2, s.num_kv_heads, s.head_dim)
        return picked, picked[:, :size].view(self.dtype).view(shape)

    def write(self, table: Tensor, rows: Tensor, picked: Tensor) -> None:
        table.index_copy_(0, rows.flatten(), picked.view(rows.numel(), -1))


@dataclass(frozen=True)
class QuantizedDecodes:
    """Sequences with one query token. `rows` (sequence, width) are their full blocks, padded;
    `visible` (sequence, width * block_size + block_size) says what may be read of those and of
    the tail, `masks[window]` (sequence, 1, 1, …) adds the window, `sinks[window]` (sequence, 1, 1,
    sinks) is what the anchored query sees. The tails of `filled` become the blocks
    `filled_rows`."""

    rows: Tensor
    tail_rows: Tensor
    slots: Tensor
    visible: Tensor
    masks: Mapping[Window, Tensor]
    sinks: Mapping[Window, Tensor | None]
    filled: Tensor
    filled_rows: Tensor


@dataclass(frozen=True)
class QuantizedChunk:
    """Query tokens [start, end) of the batch. `rows` are the full blocks before the chunk,
    `new_rows` those that it fills; `tail_len` tokens of the tail precede it in its first block.
    `masks[window]` is (end - start, tokens in `rows` and `new_rows`, then tail and chunk),
    `sinks[window]` (end - start, sinks)."""

    start: int
    end: int
    rows: Tensor
    new_rows: Tensor
    tail_rows: Tensor
    tail_len: int
    masks: Mapping[Window, Tensor]
    sinks: Mapping[Window, Tensor | None]


@dataclass(frozen=True)
class QuantizedBatch:
    store: TailStore
    decodes: QuantizedDecodes | None
    prefills: Sequence[QuantizedChunk]


def quantized_attention(
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    batch: QuantizedBatch,
    window: Window,
    scale: float | None = None,
    softcap: float | None = None,
    anchored: Tensor | None = None,
) -> Tensor:
    """As `paged_attention`, and writes `kv` into the cache whose layer is `table`, (block,
    bytes)."""
    how = (window, scale, softcap, anchored)
    outputs = []
    if batch.decodes is not None:
        n = len(batch.decodes.slots)
        outputs.append(_decode(q[:n], kv[:n], table, batch.store, batch.decodes, *how))
    for chunk in batch.prefills:
        rows = slice(chunk.start, chunk.end)
        outputs.append(_prefill(q[rows], kv[rows], table, batch.store, chunk, *how))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _decode(
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    store: TailStore,
    group: QuantizedDecodes,
    window: Window,
    scale: float | None,
    softcap: float | None,
    anchored: Tensor | None,
) -> Tensor:
    b, num_heads, head_dim = q.shape
    picked, tails = store.read(table, group.tail_rows)
    tails[torch.arange(b), group.slots] = kv
    store.write(table, group.tail_rows, picked)
    full = store.codec.decode(table.index_select(0, group.rows.flatten()))
    length = group.rows.shape[1] * full.shape[1]
    context = torch.cat((full.view(b, length, *full.shape[2:]), tails.float()), dim=1)
    # What is not visible may be anything, also no number.
    context.masked_fill_(~group.visible[..., None, None, None], 0.0)
    keys, values = context.permute(2, 0, 3, 1, 4)
    shape = (b, kv.shape[2], -1, head_dim)
    sinks = None
    if anchored is not None and (mask := group.sinks[window]) is not None:
        sinks = SinkView(anchored[:b].float().view(shape), mask)
    folded = q.float().view(shape)
    out = attend(folded, keys, values, group.masks[window], scale, softcap, sinks=sinks)
    if len(group.filled):
        table.index_copy_(0, group.filled_rows, store.codec.encode(tails[group.filled]))
    return out.reshape(b, num_heads, head_dim).to(q.dtype)


def _prefill(
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    store: TailStore,
    chunk: QuantizedChunk,
    window: Window,
    scale: float | None,
    softcap: float | None,
    anchored: Tensor | None,
) -> Tensor:
    n, num_heads, head_dim = q.shape
    codec, size = store.codec, store.codec.sizes.block_size
    picked, tail = store.read(table, chunk.tail_rows)
    fresh = torch.cat((tail[0, : chunk.tail_len], kv))
    num_filled = len(chunk.new_rows) * size
    new = codec.encode(fresh[:num_filled].view(len(chunk.new_rows), size, *kv.shape[1:]))
    table.index_copy_(0, chunk.new_rows, new)
    rest = fresh[num_filled:]
    tail[0, : len(rest)] = rest
    store.write(table, chunk.tail_rows, picked)
    before = codec.decode(torch.cat((table.index_select(0, chunk.rows), new)))
    context = torch.cat((before.flatten(0, 1), fresh.float()))
    keys, values = context.permute(1, 2, 0, 3).unsqueeze(2)
    by_head = (n, kv.shape[2], -1, head_dim)
    query = q.float().view(by_head).permute(1, 2, 0, 3)
    sinks = None
    if anchored is not None and (mask := chunk.sinks[window]) is not None:
        own = anchored[chunk.start : chunk.end].float()
        sinks = SinkView(own.view(by_head).permute(1, 2, 0, 3), mask)
    shape = (*query.shape[:2], -1, -1)
    keys, values = keys.expand(shape), values.expand(shape)
    out = attend(query, keys, values, chunk.masks[window], scale, softcap, sinks=sinks)
    return out.permute(2, 0, 1, 3).reshape(n, num_heads, head_dim).to(q.dtype)
