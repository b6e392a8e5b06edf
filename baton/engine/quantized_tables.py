"""The index tensors and masks of a step over a quantized cache; see `ops.quantized_attention`."""

from collections.abc import Sequence as ListOf

import torch
from torch import Tensor

from baton.engine.kv.codec import BlockCodec
from baton.engine.kv_cache import DTYPES
from baton.engine.kv_layout import KVLayout
from baton.engine.masks import Streams, additive, sink_mask, visible
from baton.engine.ops.attention import Window
from baton.engine.ops.quantized_attention import (
    QuantizedBatch,
    QuantizedChunk,
    QuantizedDecodes,
    TailStore,
)
from baton.engine.ops.quantized_in_place import QuantizedPlaces
from baton.engine.sequence import ScheduledSequence


class QuantizedTables:
    def __init__(self, layout: KVLayout, windows: ListOf[Window]) -> None:
        assert layout.quantized is not None
        self._size = layout.block_size
        self._windows = windows
        self._store = TailStore(BlockCodec(layout.quantized), DTYPES[layout.compute_dtype])

    def batch(self, items: ListOf[ScheduledSequence], num_decodes: int) -> QuantizedBatch:
        """The first `num_decodes` items have one new token."""
        prefills, start = [], num_decodes
        for item in items[num_decodes:]:
            prefills.append(self._chunk(item, start))
            start += item.num_new_tokens
        decodes = self._decodes(items[:num_decodes]) if num_decodes else None
        return QuantizedBatch(self._store, decodes, prefills)

    def places(self, items: ListOf[ScheduledSequence]) -> QuantizedPlaces:
        """For kernels that read in place; tables of blocks are in the batch as of any cache."""
        size = self._size
        filling: list[list[int]] = []
        rows: list[int] = []
        filled: list[tuple[int, int, int]] = []
        start = 0
        for item in items:
            seq, first = item.seq, item.seq.num_kept_tokens
            before, full = first // size, (first + item.num_new_tokens) // size
            if full > before:
                filling.append(seq.tail_blocks)
                rows += seq.block_table[before:full]
                filled.append((start, first - before * size, full * size - first))
            start += item.num_new_tokens
        own = len(filling) * size
        tokens: list[int] = []
        for index, (start, in_tail, fresh) in enumerate(filled):
            tokens += range(index * size, index * size + in_tail)
            tokens += range(own + start, own + start + fresh)
        return QuantizedPlaces(
            self._store,
            torch.tensor([item.seq.tail_blocks for item in items], dtype=torch.int32),
            torch.tensor(filling, dtype=torch.long),
            torch.tensor(rows, dtype=torch.long),
            torch.tensor(tokens, dtype=torch.long),
        )

    def _decodes(self, items: ListOf[ScheduledSequence]) -> QuantizedDecodes:
        positions = torch.tensor([item.seq.num_seen_tokens(self._size) for item in items])
        tables = [item.seq.seen_blocks for item in items]
        num_full, slots = positions // self._size, positions % self._size
        width = int(num_full.max())
        rows = [
            table[:count] + table[:1] * (width - count)
            for table, count in zip(tables, num_full.tolist(), strict=True)
        ]
        places = torch.arange(width * self._size).expand(len(items), -1)
        tail = num_full.unsqueeze(1) * self._size + torch.arange(self._size)
        readable = places < (num_full * self._size).unsqueeze(1)
        seen = torch.cat((readable, torch.arange(self._size) <= slots.unsqueeze(1)), dim=1)
        places = torch.cat((places, tail), dim=1)
        ends, streams = positions.unsqueeze(1), Streams.of(items)
        masks = {w: _mask(seen, places, ends, w, streams)[:, None, None] for w in self._windows}
        sinks = {w: sink_mask(ends, w, streams, torch.float32) for w in self._windows}
        filled = torch.nonzero(slots == self._size - 1).flatten()
        filled_rows = [tables[i][int(num_full[i])] for i in filled.tolist()]
        return QuantizedDecodes(
            torch.tensor(rows, dtype=torch.long).view(len(items), width),
            torch.tensor([item.seq.tail_blocks for item in items]),
            slots,
            seen,
            masks,
            {w: None if mask is None else mask[:, None, None] for w, mask in sinks.items()},
            filled,
            torch.tensor(filled_rows, dtype=torch.long),
        )

    def _chunk(self, item: ScheduledSequence, start: int) -> QuantizedChunk:
        table, first = item.seq.seen_blocks, item.seq.num_seen_tokens(self._size)
        end = first + item.num_new_tokens
        num_before, num_full = first // self._size, end // self._size
        queries = torch.arange(first, end).unsqueeze(1)
        full, fresh = (
            torch.arange(num_full * self._size),
            torch.arange(num_before * self._size, end),
        )
        seen = torch.cat(
            (
                full // self._size < queries // self._size,
                (fresh // self._size == queries // self._size) & (fresh <= queries),
            ),
            dim=1,
        )
        places, streams = torch.cat((full, fresh)), Streams.of([item])
        return QuantizedChunk(
            start,
            start + item.num_new_tokens,
            torch.tensor(table[:num_before], dtype=torch.long),
            torch.tensor(table[num_before:num_full], dtype=torch.long),
            torch.tensor([item.seq.tail_blocks]),
            first - num_before * self._size,
            {w: _mask(seen, places, queries, w, streams) for w in self._windows},
            {w: sink_mask(queries, w, streams, torch.float32) for w in self._windows},
        )


def _mask(
    seen: Tensor, places: Tensor, queries: Tensor, window: Window, streams: Streams | None
) -> Tensor:
    """Additive, float32."""
    return additive(seen & visible(places, queries, window, streams), torch.float32)
