"""Causal attention of a ragged batch over a paged KV cache.

Every sequence reads only blocks of its own block table, so what it computes does not depend on
its batch-mates. A `PagedBatch` is for the kernels that read blocks in place. An `AttentionBatch`
is for torch: sequences with one query token each come first, then prefill chunks; masks and
index tensors are made once per step and shared by all layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.ops.cpu.kernels import Streams, kernels, takes_heads
from baton.engine.ops.sinks import Anchors, SinkView, attend_with_sinks

if TYPE_CHECKING:
    from baton.engine.ops.quantized_attention import QuantizedBatch
    from baton.engine.ops.quantized_in_place import QuantizedPlaces

Window = int | None


class Retention(Protocol):
    """Hears of each layer whose attention is computed."""

    def after(
        self,
        layer: int,
        q: Tensor,
        cache: tuple[Tensor, Tensor],
        scale: float | None,
        softcap: float | None,
    ) -> None: ...


Rows = Tensor | int
"""Where the context of some sequences is in a layer's table: the rows of all their key blocks,
then of their value blocks. A lone sequence whose blocks are consecutive needs only the number of
the first: it is read in place."""


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences with one query token. `masks[window]` is (sequence, 1, 1, max_context), None
    when every sequence sees all of it; `sinks[window]`, if there is one, is
    (sequence, 1, 1, sinks)."""

    num_seqs: int
    max_context: int
    rows: Rows
    masks: Mapping[Window, Tensor | None]
    sinks: Mapping[Window, Tensor | None] = field(default_factory=dict)


@dataclass(frozen=True)
class PrefillChunk:
    """Query tokens [start, end) of the batch, the last of `context_len` tokens. `rows` is None
    when nothing precedes the chunk: its keys are the ones just computed. `masks[window]` is
    (end - start, context_len); None means plain causal; `sinks[window]` (end - start, sinks)."""

    start: int
    end: int
    context_len: int
    rows: Rows | None
    masks: Mapping[Window, Tensor | None]
    sinks: Mapping[Window, Tensor | None] = field(default_factory=dict)


@dataclass(frozen=True)
class AttentionBatch:
    """`slot_mapping` says where the key and value of every token of the batch go. Over a
    quantized cache `quantized` says everything."""

    slot_mapping: Tensor
    decodes: DecodeGroup | None = None
    prefills: Sequence[PrefillChunk] = field(default_factory=tuple)
    quantized: "QuantizedBatch | None" = None
    anchors: Anchors | None = None
    """Of a batch with sinks."""
    retention: Retention | None = None


@dataclass(frozen=True)
class PagedBatch:
    """Sequence s has the queries [starts[s], starts[s + 1]) of the batch, the last of lengths[s]
    tokens. `tables` is (sequence, block), `starts` (sequences + 1), `lengths` (sequence), all
    int32; entries of `tables` past a sequence's end or before all windows are never followed.
    With sinks, `streams[window]` says what each sequence sees in layers of that window. Over a
    quantized cache `quantized` says what else there is, and `slot_mapping` nothing."""

    slot_mapping: Tensor
    tables: Tensor
    starts: Tensor
    lengths: Tensor
    block_size: int
    streams: Mapping[Window, Streams] = field(default_factory=dict)
    quantized: "QuantizedPlaces | None" = None
    anchors: Anchors | None = None
    retention: Retention | None = None


Batch = AttentionBatch | PagedBatch


def reads_in_place(dtype: torch.dtype, head_dim: int, softcap: float | None) -> bool:
    """Whether there are kernels that take such a model's batches as `PagedBatch`."""
    return softcap is None and takes_heads(dtype, head_dim)


def write_kv(kv: Tensor, slots: Tensor, slot_mapping: Tensor) -> None:
    """Stores (n, key|value, kv_head, head_dim) in a layer's slots."""
    slots.index_copy_(1, slot_mapping, kv.transpose(0, 1))


def paged_attention(
    q: Tensor,
    kv: Tensor,
    cache: tuple[Tensor, Tensor],
    batch: Batch,
    window: Window,
    scale: float | None = None,
    softcap: float | None = None,
    anchored: Tensor | None = None,
) -> Tensor:
    """Attention output (n, head, head_dim) of queries (n, head, head_dim). `kv` holds the
    batch's own keys and values, (n, key|value, kv_head, head_dim), already written to the cache
    whose layer `cache` is (slots, table). `scale` (default 1 / root of head_dim) multiplies the
    logits; `softcap` then bends them into (-softcap, softcap). `anchored` is the batch's queries
    as they meet sinks, if it has any."""
    slots, table = cache
    if isinstance(batch, PagedBatch):
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return attention_in_place(q, slots, batch, window, scale, anchored)
    how = (window, scale, softcap, anchored)
    if not batch.prefills and batch.decodes is not None:
        return _decode(q, kv, table, batch.decodes, *how)
    outputs = []
    if batch.decodes is not None:
        outputs.append(_decode(q[: batch.decodes.num_seqs], kv, table, batch.decodes, *how))
    for chunk in batch.prefills:
        outputs.append(_prefill(q[chunk.start : chunk.end], kv, table, chunk, *how))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def attention_in_place(
    q: Tensor,
    slots: Tensor,
    batch: PagedBatch,
    window: Window,
    scale: float,
    anchored: Tensor | None = None,
) -> Tensor:
    """As `paged_attention`, of queries that may be a slice of wider rows."""
    loaded = kernels()
    assert loaded is not None, "PagedBatch is for models that `reads_in_place`"
    return loaded.attention(
        q,
        slots,
        batch.tables,
        batch.starts,
        batch.lengths,
        batch.block_size,
        window,
        scale,
        batch.streams.get(window),
        anchored,
    )


def _context(table: Tensor, rows: Rows, kv: Tensor, num_seqs: int, length: int) -> list[Tensor]:
    """Keys and values (sequence, kv_head, length, head_dim) of the blocks in `rows`. One strided
    view each: at small batches the views would otherwise cost more than the copy."""
    num_kv_heads, head_dim = kv.shape[2:]
    slot = num_kv_heads * head_dim
    if isinstance(rows, Tensor):
        picked = table.index_select(0, rows)
        start: int = 0
        values = picked.numel() // 2
        per_seq = values // num_seqs
    else:
        picked, per_seq = table, 0
        start = int(table.storage_offset()) + rows * table.shape[1]
        values = table.numel() // 2
    size, stride = (num_seqs, num_kv_heads, length, head_dim), (per_seq, head_dim, slot, 1)
    return [picked.as_strided(size, stride, offset + start) for offset in (0, values)]


def _decode(
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    group: DecodeGroup,
    window: Window,
    scale: float | None,
    softcap: float | None,
    anchored: Tensor | None,
) -> Tensor:
    b, num_heads, head_dim = q.shape
    keys, values = _context(table, group.rows, kv, b, group.max_context)
    # The query heads that share a KV head become query positions, so KV is read once.
    shape = (b, kv.shape[2], num_heads // kv.shape[2], head_dim)
    sinks = None
    if anchored is not None and (mask := group.sinks.get(window)) is not None:
        sinks = SinkView(anchored[:b].reshape(shape), mask)
    out = attend(q.view(shape), keys, values, group.masks[window], scale, softcap, sinks=sinks)
    return out.reshape(b, num_heads, head_dim)


def _prefill(
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    chunk: PrefillChunk,
    window: Window,
    scale: float | None,
    softcap: float | None,
    anchored: Tensor | None,
) -> Tensor:
    n, num_heads, head_dim = q.shape
    if chunk.rows is None:
        keys, values = kv[chunk.start : chunk.end].permute(1, 2, 0, 3)
    else:
        keys, values = (x[0] for x in _context(table, chunk.rows, kv, 1, chunk.context_len))
    num_kv_heads = kv.shape[2]
    group = num_heads // num_kv_heads
    # (kv_head, group, ...): a KV head is broadcast over its group without copying it.
    by_head = (n, num_kv_heads, group, head_dim)
    query = q.view(by_head).permute(1, 2, 0, 3)
    sinks = None
    if anchored is not None and (mask := chunk.sinks.get(window)) is not None:
        own = anchored[chunk.start : chunk.end]
        sinks = SinkView(own.reshape(by_head).permute(1, 2, 0, 3), mask)
    shape = (num_kv_heads, group, chunk.context_len, head_dim)
    out = attend(
        query,
        keys.unsqueeze(1).expand(shape),
        values.unsqueeze(1).expand(shape),
        chunk.masks[window],
        scale,
        softcap,
        is_causal=n > 1,
        sinks=sinks,
    )
    return out.permute(2, 0, 1, 3).reshape(n, num_heads, head_dim)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float | None,
    softcap: float | None,
    is_causal: bool = False,
    sinks: SinkView | None = None,
) -> Tensor:
    """`mask` is additive; without one, `is_causal` says whether the last queries see less."""
    if sinks is not None:
        assert mask is not None, "whoever has sinks does not see everything"
        return attend_with_sinks(query, sinks, keys, values, mask, scale, softcap)
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=mask is None and is_causal, scale=scale
        )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    logits = torch.matmul(query.float(), keys.float().transpose(-1, -2)).mul_(scale / softcap)
    logits.tanh_().mul_(softcap)
    if mask is not None:
        logits += mask
    elif is_causal:
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu_(1)
        logits.masked_fill_(hidden, float("-inf"))
    return torch.matmul(logits.softmax(dim=-1).to(values.dtype), values)
