"""How the blocks of a frame lie in its payload: as they are in the sender's cache, or encoded.

Encoded are full blocks, as a quantized cache keeps them: keys per channel over a block's tokens,
values per token (KIVI, Liu et al., arXiv 2402.02750), scales among the bytes. What comes after them
(the last block while it is not full, and what a policy keeps beside the tokens) is never encoded.
So a payload is the encoded blocks, [layer, block, byte], then the others, [layer, plane, block,
block_size, kv_head, head_dim]; its length follows from the plan.
"""

from bisect import bisect_left
from dataclasses import replace

import torch
from torch import Tensor

from baton.engine.kv.codec import BlockCodec
from baton.engine.kv.quantized_sizes import KINDS, QuantizedSizes
from baton.engine.kv_cache import DTYPES
from baton.engine.kv_layout import KVLayout
from baton.engine.transfer.plan import RAW, FramePlan

_CODEC_WORK = 16
"""Bytes copied in the time in which one is encoded or decoded."""


def work(num_bytes: int, as_it_is: bool) -> int:
    """Of putting a payload where it belongs, in bytes copied."""
    return num_bytes if as_it_is else _CODEC_WORK * num_bytes


def codecs_of(layout: KVLayout) -> tuple[str, ...]:
    """Those that a cache of this layout takes, and sends unless it is quantized itself."""
    if "latent" in layout.layer_kinds or layout.head_dim % 2:
        return ()
    return tuple(KINDS)


def bytes_per_token(layout: KVLayout, codec: str) -> int:
    """Of full blocks on their way."""
    return (layout if codec == RAW else _encoded(layout, codec)).bytes_per_token


def _encoded(layout: KVLayout, kind: str) -> KVLayout:
    return replace(layout, dtype=f"{kind}/{layout.compute_dtype}")


class WireForm:
    """Of the hand-off of one sequence. `layout` is the sender's, in blocks of the hand-off;
    `num_full` blocks at the beginning are full."""

    def __init__(self, layout: KVLayout, num_full: int) -> None:
        self.layout = layout
        self._num_full = num_full

    def num_full(self, plan: FramePlan) -> int:
        """Of the plan's blocks; they come first."""
        return bisect_left(plan.positions, self._num_full)

    def num_bytes(self, plan: FramePlan) -> int:
        full = self.num_full(plan) if plan.codec != RAW else 0
        rest = (len(plan.positions) - full) * self.layout.bytes_per_block // self.layout.num_layers
        encoded = full * self._sizes(plan.codec).row_bytes if full else 0
        return plan.layer_count * (encoded + rest)

    def encode(self, plan: FramePlan, unit: Tensor, out: Tensor) -> None:
        """Blocks as `KVCache.gather` returns them, into flat bytes."""
        full = self.num_full(plan)
        values = unit[:, :, :full].permute(0, 2, 3, 1, 4, 5).flatten(0, 1)
        rows = self._codec(plan.codec).encode(values).flatten()
        out[: len(rows)] = rows
        out[len(rows) :] = unit[:, :, full:].contiguous().view(-1).view(torch.uint8)

    def rows(self, plan: FramePlan, flat: Tensor) -> Tensor:
        """The encoded blocks, (layer, 1, block, byte), as a quantized cache of the kind has."""
        full, row_bytes = self.num_full(plan), self._sizes(plan.codec).row_bytes
        shape = (plan.layer_count, 1, full, row_bytes)
        return flat[: plan.layer_count * full * row_bytes].view(shape)

    def decode(self, plan: FramePlan, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Full blocks, then the others: (layer, key|value, block, slot, kv_head, head_dim), of the
        sender's dtype where they were not encoded, else float32."""
        full, count = self.num_full(plan), len(plan.positions)
        if plan.codec == RAW:
            unit = self._unit(plan, flat, count)
            return unit[:, :, :full], unit[:, :, full:]
        rows = self.rows(plan, flat)
        values = self._codec(plan.codec).decode(rows.flatten(0, 2))
        values = values.unflatten(0, (plan.layer_count, full)).permute(0, 3, 1, 2, 4, 5)
        return values, self._unit(plan, flat[rows.numel() :], count - full)

    def _unit(self, plan: FramePlan, flat: Tensor, count: int) -> Tensor:
        shape = self.layout.unit_shape(plan.layer_count, count)
        return flat.view(DTYPES[self.layout.dtype]).view(shape)

    def _codec(self, kind: str) -> BlockCodec:
        return BlockCodec(self._sizes(kind))

    def _sizes(self, kind: str) -> QuantizedSizes:
        sizes = _encoded(self.layout, kind).quantized
        assert sizes is not None
        return sizes
