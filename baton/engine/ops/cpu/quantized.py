"""The compiled attention over quantized blocks as a function on tensors."""

import ctypes
from ctypes import c_float, c_int, c_long, c_void_p
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from baton.engine.kv.quantized_sizes import QuantizedSizes
from baton.engine.ops.cpu.by_dtype import by_dtype

if TYPE_CHECKING:
    from baton.engine.ops.cpu.kernels import Streams

_KINDS = {"fp8": 0, "int8": 1, "int4": 2}
_SIGNATURE = (c_void_p,) * 12 + (c_long,) * 11 + (c_float, c_int, c_int)


class QuantizedAttention:
    def __init__(self, loaded: ctypes.CDLL) -> None:
        self._functions = by_dtype(loaded, "baton_quantized_attention", _SIGNATURE)

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        table: Tensor,
        sizes: QuantizedSizes,
        tables: Tensor,
        tails: Tensor,
        starts: Tensor,
        lengths: Tensor,
        window: int | None,
        scale: float,
        streams: "Streams | None" = None,
        anchored: Tensor | None = None,
    ) -> Tensor:
        """As `Kernels.attention`, over quantized blocks, the rows of `table`. The batch's own `kv`
        (n, key|value, kv_head, head_dim) may be a slice of wider rows; what fills no block goes
        into the rows `tails` (sequence, row), int32. See `ops.quantized_attention`."""
        n, num_heads, head_dim = q.shape
        out = torch.empty(n, num_heads, head_dim, dtype=q.dtype)
        # Each plane's scales, zero points and numbers.
        places = [0, *accumulate(sizes.parts)]
        parts = (c_long * 6)(*places[:-1:2], *places[1::2])
        self._functions[q.dtype](
            q.data_ptr(),
            out.data_ptr(),
            kv.data_ptr(),
            table.data_ptr(),
            tables.data_ptr(),
            tails.data_ptr(),
            ctypes.addressof(parts),
            starts.data_ptr(),
            lengths.data_ptr(),
            None if anchored is None else anchored.data_ptr(),
            None if streams is None else streams.windows.data_ptr(),
            None if streams is None else streams.sinks.data_ptr(),
            lengths.shape[0],
            q.stride(0),
            kv.stride(0),
            table.shape[1],
            tables.shape[1],
            tails.shape[1],
            num_heads,
            sizes.num_kv_heads,
            head_dim,
            sizes.block_size,
            window or 0,
            scale,
            _KINDS[sizes.kind],
            torch.get_num_threads(),
        )
        return out
