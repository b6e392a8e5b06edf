"""Where the blocks of an incoming hand-off land, in whatever form the cache there has.

Payloads of an equal layout are copied as they are. Everything else is decoded and written as this
cache keeps it: in its own dtype or, if it is quantized, full blocks encoded and the last one,
while it is not full, in the tail. Blocks that come encoded as the cache keeps them stay so.
"""

from collections.abc import Sequence as ListOf

import torch
from torch import Tensor

from baton.engine.kv.codec import BlockCodec
from baton.engine.kv_cache import DTYPES, KVCache
from baton.engine.kv_layout import KVLayout
from baton.engine.sequence import Sequence
from baton.engine.transfer.base import HandoffRefused, Payload
from baton.engine.transfer.payload import flat_bytes, smaller_blocks, verify, write_payload
from baton.engine.transfer.plan import RAW, FramePlan
from baton.engine.transfer.wire import WireForm, codecs_of, work


class Landing:
    """For one hand-off to `seq`, which holds its blocks."""

    def __init__(self, cache: KVCache, source: KVLayout, seq: Sequence) -> None:
        """`source` is the sender's layout, in blocks of the hand-off. Raises HandoffRefused for
        what cannot be written here."""
        size = source.block_size
        self.converts = source.dtype != cache.layout.dtype
        if self.converts and seq.kv_policy.keeps_state:
            raise HandoffRefused(
                f"kv_policy {seq.kv_policy.name} needs caches of one dtype, not "
                f"{source.dtype!r} at prefill and {cache.layout.dtype!r} at decode"
            )
        plain = source.quantized is None
        self.codecs = (RAW, *(codecs_of(source) if plain else ()))
        self.positions = seq.handoff_positions(size, plain)
        """Of the blocks that a sender with nothing held here ships."""
        self.table: ListOf[int] = smaller_blocks(seq.held_blocks, cache.layout.block_size // size)
        self._cache = cache.in_blocks_of(size)
        self._tail = seq.tail_blocks
        self._form = WireForm(source, seq.num_full_shipped(size))

    def num_bytes(self, plan: FramePlan) -> int:
        return self._form.num_bytes(plan)

    def work(self, plan: FramePlan) -> int:
        """Of `write`, in bytes copied."""
        return work(self.num_bytes(plan), plan.codec == RAW and not self.converts)

    def write(self, plan: FramePlan, payload: Payload, checksum: int | None) -> None:
        """HandoffDamaged when it is not what was sent; nothing is left of it then."""
        if plan.codec == RAW and not self.converts:
            write_payload(self._cache, plan, payload, checksum, self.table)
            return
        flat = flat_bytes(self._form.layout, plan, payload)
        verify(plan, flat, self.num_bytes(plan), checksum)
        quantized = self._cache.layout.quantized
        if quantized is None:
            dtype = DTYPES[self._cache.layout.dtype]
            parts = [part.to(dtype) for part in self._form.decode(plan, flat)]
            self._scatter(plan, plan.positions, torch.cat(parts, dim=2))
        elif plan.codec == quantized.kind:
            self._write_full(plan, self._form.rows(plan, flat))
            self._write_tail(plan, self._form.decode(plan, flat)[1])
        else:
            full, rest = self._form.decode(plan, flat)
            values = full.permute(0, 2, 3, 1, 4, 5).flatten(0, 1)
            rows = BlockCodec(quantized).encode(values)
            self._write_full(
                plan, rows.view(plan.layer_count, 1, full.shape[2], quantized.row_bytes)
            )
            self._write_tail(plan, rest)

    def _write_full(self, plan: FramePlan, rows: Tensor) -> None:
        self._scatter(plan, plan.positions[: rows.shape[2]], rows)

    def _write_tail(self, plan: FramePlan, rest: Tensor) -> None:
        """The block that is not full, (layer, key|value, 1, slot, kv_head, head_dim), if any."""
        quantized = self._cache.layout.quantized
        if not rest.shape[2] or quantized is None:
            return
        values = rest[:, :, 0].transpose(1, 2).to(DTYPES[self._cache.layout.compute_dtype])
        raw = values.contiguous().flatten(1).view(torch.uint8)
        rows = raw.new_zeros(plan.layer_count, len(self._tail) * quantized.row_bytes)
        rows[:, : raw.shape[1]] = raw
        unit = rows.view(plan.layer_count, 1, len(self._tail), quantized.row_bytes)
        self._cache.scatter(plan.layer_start, plan.layer_count, self._tail, unit)

    def _scatter(self, plan: FramePlan, positions: ListOf[int], unit: Tensor) -> None:
        blocks = [self.table[position] for position in positions]
        unit = unit.to(self._cache.data.device)
        self._cache.scatter(plan.layer_start, plan.layer_count, blocks, unit)
