"""Runs one scheduled step: copies blocks, feeds the tokens, returns logits.

The only place where lists become tensors. Knows the sequence's fields that say what to feed
and where; knows nothing of queues, sampling or who owns a block.
"""

from array import array
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import replace

import torch
from torch import Tensor

from baton.engine.kv_cache import DTYPES, KVCache
from baton.engine.kv_stores import KVStore
from baton.engine.masks import (
    Streams,
    anchors_of,
    decode_mask,
    kernel_streams,
    prefill_mask,
    sink_mask,
)
from baton.engine.models.decoder import DecoderModel
from baton.engine.ops.attention import (
    AttentionBatch,
    Batch,
    DecodeGroup,
    PagedBatch,
    PrefillChunk,
    Rows,
    Window,
)
from baton.engine.quantized_tables import QuantizedTables
from baton.engine.retention import Retention
from baton.engine.sequence import ScheduledBatch, ScheduledSequence

OnLayers = Callable[[ScheduledBatch, range], None]
"""Hears, in the engine's thread, which layers have written the KV of a batch."""

_REPORT_BYTES = 4 << 20
"""Of a batch's KV. A frame costs each end about a millisecond of a core; less is not worth one."""


class ModelRunner:
    def __init__(self, model: DecoderModel, kv_cache: KVCache) -> None:
        layout, config = kv_cache.layout, model.config
        ours = (config.num_layers, *config.kv_shape, model.dtype)
        theirs = (
            layout.num_layers,
            1 if "latent" in layout.layer_kinds else 2,
            layout.num_kv_heads,
            layout.head_dim,
            DTYPES[layout.compute_dtype],
        )
        if ours != theirs:
            raise ValueError(f"the KV cache is for {theirs}, the model is {ours}")
        self.model = model
        self.kv_cache = kv_cache
        self.on_layers: OnLayers | None = None
        self._windows: tuple[Window, ...] = tuple(dict.fromkeys(config.windows))
        self._store = KVStore.of(layout, DTYPES[layout.compute_dtype])
        self._quantized: QuantizedTables | None = None
        if layout.quantized is not None:
            self._quantized = QuantizedTables(layout, self._windows)

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch) -> Tensor:
        """float32 logits (rows, vocab) of the items whose tokens are now all computed, in the
        order of the batch: of the last token, and of each of its draft."""
        self.kv_cache.copy_blocks(batch.block_copies)
        items = batch.items
        sampling = _sampling_rows(items)
        if not items:
            return torch.empty(0, self.model.config.vocab_size)
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for item in items:
            start = item.seq.num_computed_tokens
            end = start + item.num_new_tokens
            token_ids += item.new_token_ids
            positions += range(start, end)
            dropped = item.seq.num_dropped_tokens
            slots += self._slots(item.seq.block_table, start - dropped, end - dropped)
        rows = None if len(sampling) == len(token_ids) else torch.tensor(sampling, dtype=torch.long)
        hidden = self.model.forward(
            torch.tensor(token_ids),
            torch.tensor(positions),
            self.kv_cache,
            self._batch(items, torch.tensor(slots)),
            rows,
            self._report(batch),
        )
        if not sampling:
            return torch.empty(0, self.model.config.vocab_size)
        return self.model.logits(hidden)

    def _report(self, batch: ScheduledBatch) -> Callable[[int], None] | None:
        """A quantized block is complete only with the step."""
        report = self.on_layers
        if report is None or self._quantized is not None:
            return None
        layout = self.kv_cache.layout
        num_layers = layout.num_layers
        num_bytes = sum(item.num_new_tokens for item in batch.items) * layout.bytes_per_token
        step = max(1, -(-_REPORT_BYTES * num_layers // max(1, num_bytes)))

        def done(end: int) -> None:
            if end % step == 0 or end == num_layers:
                report(batch, range((end - 1) // step * step, end))

        return done

    def _slots(self, block_table: ListOf[int], start: int, end: int) -> list[int]:
        size = self.kv_cache.layout.block_size
        return [block_table[p // size] * size + p % size for p in range(start, end)]

    def _batch(self, items: ListOf[ScheduledSequence], slots: Tensor) -> Batch:
        make = self._paged_batch if self.model.reads_in_place else self._attention_batch
        batch: Batch = make(items, slots)
        if all(item.seq.kv_policy.is_full for item in items):
            return batch
        if isinstance(batch, PagedBatch):
            batch = replace(batch, streams=kernel_streams(items, self._windows))
        retention = Retention.of(items, self._store)
        return replace(batch, anchors=anchors_of(items), retention=retention)

    def _paged_batch(self, items: ListOf[ScheduledSequence], slots: Tensor) -> PagedBatch:
        lengths = [item.seq.num_kept_tokens + item.num_new_tokens for item in items]
        width = self._num_blocks(max(lengths))
        table = array("i")
        starts = [0]
        for item in items:
            blocks = item.seq.block_table[:width]
            table.extend(blocks)
            table.extend([0] * (width - len(blocks)))
            starts.append(starts[-1] + item.num_new_tokens)
        return PagedBatch(
            slots,
            torch.frombuffer(table, dtype=torch.int32).view(len(items), width),
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(lengths, dtype=torch.int32),
            self.kv_cache.layout.block_size,
            quantized=None if self._quantized is None else self._quantized.places(items),
        )

    def _attention_batch(self, items: ListOf[ScheduledSequence], slots: Tensor) -> AttentionBatch:
        num_decodes = 0
        while num_decodes < len(items) and items[num_decodes].num_new_tokens == 1:
            num_decodes += 1
        if self._quantized is not None:
            quantized = self._quantized.batch(items, num_decodes)
            return AttentionBatch(slots, quantized=quantized)
        prefills = []
        start = num_decodes
        for item in items[num_decodes:]:
            prefills.append(self._prefill_chunk(item, start))
            start += item.num_new_tokens
        decodes = self._decode_group(items[:num_decodes]) if num_decodes else None
        return AttentionBatch(slots, decodes, tuple(prefills))

    def _decode_group(self, items: ListOf[ScheduledSequence]) -> DecodeGroup:
        size = self.kv_cache.layout.block_size
        tables = [item.seq.seen_blocks for item in items]
        lengths = [item.seq.num_seen_tokens(size) + 1 for item in items]
        longest = max(lengths)
        width = self._num_blocks(longest)
        table: list[int] = []
        for blocks, length in zip(tables, lengths, strict=True):
            count = self._num_blocks(length)
            # A short row is padded with a block of its own: it never reads another sequence's.
            table += blocks[:count] + blocks[:1] * (width - count)
        streams, dtype = Streams.of(items), self.model.dtype
        ends = torch.tensor(lengths).unsqueeze(1) - 1
        sinks = {w: sink_mask(ends, w, streams, dtype) for w in self._windows}
        return DecodeGroup(
            len(items),
            longest,
            self._rows(table, len(items)),
            {w: decode_mask(lengths, w, streams, dtype) for w in self._windows},
            {w: None if mask is None else mask[:, None, None] for w, mask in sinks.items()},
        )

    def _prefill_chunk(self, item: ScheduledSequence, start: int) -> PrefillChunk:
        size = self.kv_cache.layout.block_size
        computed, new = item.seq.num_seen_tokens(size), item.num_new_tokens
        length = computed + new
        rows = None
        if computed:
            rows = self._rows(item.seq.seen_blocks[: self._num_blocks(length)])
        streams, dtype = Streams.of([item]), self.model.dtype
        masks = {w: prefill_mask(computed, length, w, streams, dtype) for w in self._windows}
        queries = torch.arange(computed, length).unsqueeze(1)
        sinks = {w: sink_mask(queries, w, streams, dtype) for w in self._windows}
        return PrefillChunk(start, start + new, length, rows, masks, sinks)

    def _rows(self, block_ids: list[int], num_seqs: int = 1) -> Rows:
        first = block_ids[0]
        if num_seqs == 1 and block_ids == list(range(first, first + len(block_ids))):
            return first
        keys = torch.tensor(block_ids)
        planes, size = self.kv_cache.layout.num_planes, self.kv_cache.num_blocks
        return keys if planes == 1 else torch.cat((keys, keys + size))

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.kv_cache.layout.block_size)


def _sampling_rows(items: ListOf[ScheduledSequence]) -> list[int]:
    """Indices in the flat batch of the last token of every item that samples, and of its draft."""
    rows: list[int] = []
    end = 0
    for item in items:
        end += item.num_new_tokens
        if item.samples:
            rows += range(end - 1 - len(item.draft), end)
    return rows
