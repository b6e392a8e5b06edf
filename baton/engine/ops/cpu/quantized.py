"""Decode's attention over quantized blocks; see src/quantized.cpp and `ops.quantized_attention`."""

import ctypes
from ctypes import c_float, c_int, c_int64, c_long, c_void_p
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from baton.engine.kv.quantized_sizes import QuantizedSizes

if TYPE_CHECKING:
    from baton.engine.ops.cpu.kernels import Streams

_SIGNATURE = (c_void_p,) * 11 + (c_long,) * 9 + (c_float,) + (c_int,) * 3
_KINDS = ("fp8", "int8", "int4")


class QuantizedBlocks(NamedTuple):
    """Of each sequence: `rows` (sequence, width) of its full blocks, how many they are, and the
    slot of its query in its tail, all int64. `wide_tails`: in float32, not bfloat16."""

    rows: Tensor
    num_full: Tensor
    slots: Tensor
    wide_tails: bool


class QuantizedAttention:
    def __init__(self, loaded: ctypes.CDLL) -> None:
        self._kernel = loaded.baton_quantized_attention
        self._kernel.argtypes, self._kernel.restype = _SIGNATURE, None

    def __call__(
        self,
        q: Tensor,
        table: Tensor,
        blocks: QuantizedBlocks,
        tails: Tensor,
        sizes: QuantizedSizes,
        window: int | None,
        scale: float,
        streams: "Streams | None" = None,
        anchored: Tensor | None = None,
    ) -> Tensor:
        """One query per sequence, float32 (sequence, head, head_dim), over the blocks of `table`
        (block, bytes) and the tails, each with its query's own token: rows of bytes that begin
        with (slot, key|value, kv_head, head_dim). `streams`, `anchored` as in `attention`."""
        sequences, num_heads, head_dim = q.shape
        out, (*parts, _) = torch.empty_like(q), accumulate(sizes.parts, initial=0)
        self._kernel(
            q.data_ptr(),
            out.data_ptr(),
            None if anchored is None else anchored.data_ptr(),
            table.data_ptr(),
            blocks.rows.data_ptr(),
            blocks.num_full.data_ptr(),
            tails.data_ptr(),
            blocks.slots.data_ptr(),
            None if streams is None else streams.windows.data_ptr(),
            None if streams is None else streams.sinks.data_ptr(),
            (c_int64 * len(parts))(*parts),
            sequences,
            blocks.rows.shape[1],
            table.shape[1],
            tails.shape[1],
            num_heads,
            sizes.num_kv_heads,
            head_dim,
            sizes.block_size,
            window or 0,
            scale,
            _KINDS.index(sizes.kind),
            blocks.wide_tails,
            torch.get_num_threads(),
        )
        return out
