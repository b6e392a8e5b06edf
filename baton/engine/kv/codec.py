"""Quantized blocks: keys per channel over a block's tokens, values per token.

The scheme of KIVI (Liu et al., arXiv 2402.02750): a channel of the keys has its outliers for
every token, so a group of tokens shares a scale per channel; values have no such channels, so
each token has a scale of its own. A group is a block. Scales and zero points are among the
block's bytes; nothing outside them is needed to read it.
"""

import torch
from torch import Tensor

from baton.engine.kv.numbers import Quantized, dequantize, quantize
from baton.engine.kv.quantized_sizes import KINDS, QuantizedSizes


class BlockCodec:
    """Between (block, slot, key|value, kv_head, head_dim) and rows of bytes, one per block."""

    def __init__(self, sizes: QuantizedSizes) -> None:
        self.sizes = sizes

    def encode(self, kv: Tensor) -> Tensor:
        """(block, row_bytes) uint8; each row depends on its block alone, bit for bit."""
        kind = self.sizes.kind
        keys, values = (
            quantize(kv[:, :, 0].float(), kind, 1),
            quantize(kv[:, :, 1].float(), kind, 3),
        )
        parts = [keys.scale, values.scale, keys.zero, values.zero, keys.payload, values.payload]
        raw = [p.contiguous().flatten(1).view(torch.uint8) for p in parts if p is not None]
        row_bytes, used = self.sizes.row_bytes, sum(self.sizes.parts)
        padding = torch.zeros(len(kv), row_bytes - used, dtype=torch.uint8)
        return torch.cat([*raw, padding], dim=1)

    def decode(self, rows: Tensor) -> Tensor:
        """float32 (block, slot, key|value, kv_head, head_dim)."""
        s, n = self.sizes, len(rows)
        slots = (n, s.block_size, s.num_kv_heads)
        channels, tokens = (n, 1, s.num_kv_heads, s.head_dim), (*slots, 1)
        parts = rows[:, : sum(s.parts)].split(s.parts, dim=1)
        scales = [part.contiguous().view(torch.float16) for part in parts[:2]]
        zeros = [part.contiguous().view(torch.int8) for part in parts[2:4]]
        both = []
        for index, shape in enumerate((channels, tokens)):
            zero = zeros[index].view(shape) if s.kind == "int4" else None
            payload = parts[4 + index].reshape(*slots, s.head_dim * KINDS[s.kind] // 8)
            both.append(dequantize(Quantized(payload, scales[index].view(shape), zero), s.kind))
        return torch.stack(both, dim=2)
