"""The index tensors and masks of a step over a quantized cache; see `ops.quantized_attention`."""

from collections.abc import Sequence as ListOf

import torch
from torch import Tensor

from baton.engine.kv.codec import BlockCodec
from baton.engine.kv_cache import DTYPES
from baton.engine.kv_layout import KVLayout
from baton.engine.masks import Streams, additive, kernel_streams, sink_mask, visible
from baton.engine.ops.attention import Window
from baton.engine.ops.cpu.kernels import takes_quantized
from baton.engine.ops.quantized_attention import (
    InPlace,
    Masks,
    QuantizedBatch,
    QuantizedChunk,
    QuantizedDecodes,
    TailStore,
)
from baton.engine.sequence import ScheduledSequence


class QuantizedTables:
    def __init__(self, layout: KVLayout, windows: ListOf[Window], in_place: bool) -> None:
        """`in_place`: the model's decode steps are for kernels, where they take its blocks."""
        assert layout.quantized is not None
        self._in_place = in_place and takes_quantized(layout.quantized)
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

    def _decodes(self, items: ListOf[ScheduledSequence]) -> QuantizedDecodes:
        positions = torch.tensor([item.seq.num_seen_tokens(self._size) for item in items])
        tables = [item.seq.seen_blocks for item in items]
        num_full, slots = positions // self._size, positions % self._size
        width = int(num_full.max())
        rows = [
            table[:count] + table[:1] * (width - count)
            for table, count in zip(tables, num_full.tolist(), strict=True)
        ]
        if self._in_place:
            view: InPlace | Masks = InPlace(num_full, kernel_streams(items, self._windows))
        else:
            view = self._masks(items, positions, width)
        filled = torch.nonzero(slots == self._size - 1).flatten()
        filled_rows = [tables[i][int(num_full[i])] for i in filled.tolist()]
        return QuantizedDecodes(
            torch.tensor(rows, dtype=torch.long).view(len(items), width),
            torch.tensor([item.seq.tail_blocks for item in items]),
            slots,
            view,
            filled,
            torch.tensor(filled_rows, dtype=torch.long),
        )

    def _masks(self, items: ListOf[ScheduledSequence], positions: Tensor, width: int) -> Masks:
        ends, streams = positions.unsqueeze(1), Streams.of(items)
        begin = ends // self._size * self._size
        places = torch.arange(width * self._size).expand(len(items), -1)
        tail = begin + torch.arange(self._size)
        seen = torch.cat((places < begin, tail <= ends), dim=1)
        places = torch.cat((places, tail), dim=1)
        masks = {w: _mask(seen, places, ends, w, streams)[:, None, None] for w in self._windows}
        sinks = {w: sink_mask(ends, w, streams, torch.float32) for w in self._windows}
        return Masks(
            seen, masks, {w: None if m is None else m[:, None, None] for w, m in sinks.items()}
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
