"""Quantized blocks: keys per channel over a block's tokens, values per token.

The scheme of KIVI (Liu et al., arXiv 2402.02750): a channel of the keys has its outliers for
every token, so a group of tokens shares a scale per channel; values have no such channels, so
each token has a scale of its own. A group is a block. fp8 has the range for all channels of a head
but few digits, so its keys share a scale per head and have a mean per channel instead (ADR 0038).
Scales and zero points are among the block's bytes; nothing outside them is needed to read it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.kv.numbers import Quantized, dequantize, quantize, quantize_around_mean
from baton.engine.kv.quantized_sizes import KINDS, QuantizedSizes


class BlockCodec:
    """Between (block, slot, key|value, kv_head, head_dim) and rows of bytes, one per block."""

    def __init__(self, sizes: QuantizedSizes) -> None:
        self.sizes = sizes

    def encode(self, kv: Tensor) -> Tensor:
        """(block, row_bytes) uint8; each row depends on its block alone, bit for bit."""
        kind, numbers = self.sizes.kind, kv.float()
        keys = _keys(numbers[:, :, 0], kind)
        values = quantize(numbers[:, :, 1], kind, 3)
        parts = [keys.scale, values.scale, keys.zero, values.zero, keys.payload, values.payload]
        raw = [p.contiguous().flatten(1).view(torch.uint8) for p in parts if p is not None]
        row_bytes, used = self.sizes.row_bytes, sum(self.sizes.parts)
        padding = torch.zeros(len(kv), row_bytes - used, dtype=torch.uint8)
        return torch.cat([*raw, padding], dim=1)

    def decode(self, rows: Tensor) -> Tensor:
        """float32 (block, slot, key|value, kv_head, head_dim)."""
        s, n = self.sizes, len(rows)
        channels, tokens = (n, 1, s.num_kv_heads, s.head_dim), (n, s.block_size, s.num_kv_heads, 1)
        heads = (n, 1, s.num_kv_heads, 1)
        parts = rows[:, : sum(s.parts)].split(s.parts, dim=1)
        keys = self._numbers(parts[::2], heads if s.kind == "fp8" else channels, channels)
        return torch.stack((keys, self._numbers(parts[1::2], tokens, tokens)), dim=2)

    def _numbers(
        self, parts: Sequence[Tensor], scales: tuple[int, ...], zeros: tuple[int, ...]
    ) -> Tensor:
        """`parts` are scales, zero points and payload as bytes, then shapes of the first two."""
        s, (scale, zero, payload) = self.sizes, (part.contiguous() for part in parts)
        kept = None
        if zero.shape[1]:
            kept = zero.view(torch.int8 if s.kind == "int4" else torch.float16).view(zeros)
        shape = (len(payload), s.block_size, s.num_kv_heads, s.head_dim * KINDS[s.kind] // 8)
        return dequantize(
            Quantized(payload.view(shape), scale.view(torch.float16).view(scales), kept), s.kind
        )


def _keys(x: Tensor, kind: str) -> Quantized:
    return quantize_around_mean(x, 1, 3) if kind == "fp8" else quantize(x, kind, 1)
