"""The compiled kernels as functions on tensors.

Callers check what a kernel serves (`takes_linear`, `takes_heads`); the functions trust them: they
pass bare addresses. The foreign call lets go of the GIL. All tensors are on the CPU and, where
not said otherwise, contiguous.
"""

import ctypes
import functools
import logging
import os
from ctypes import c_float, c_int, c_long, c_uint64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.huge_pages import Arena
from baton.engine.ops.cpu.build import BuildError, cpu_flags, library, supported
from baton.engine.ops.cpu.by_dtype import DTYPES, by_dtype
from baton.engine.ops.cpu.quantized import QuantizedAttention

_log = logging.getLogger(__name__)

_DEPTH = 32
_GROUP = 32
_MAX_HEAD_DIM = 256
_WEIGHTS = Arena()


class Finish(IntEnum):
    """What becomes of a product: stored in its own dtype or float32, added to float32, gated, or
    activated."""

    STORE = 0
    FLOAT32 = 1
    ADD = 2
    SILU_AND_MUL = 3
    GELU_AND_MUL = 4
    SILU = 5
    GELU = 6


_SIGNATURES: dict[str, tuple[type, ...]] = {
    "baton_pack": (c_void_p, c_void_p, c_long, c_long),
    "baton_linear": (c_void_p,) * 4 + (c_long,) * 3 + (c_int, c_int),
    "baton_rms_norm": (c_void_p, c_void_p, c_float, c_void_p, c_long, c_long, c_int),
    "baton_rotate_and_store": (c_void_p,) * 4
    + (c_float,)
    + (c_void_p,) * 3
    + (c_long,) * 4
    + (c_int,),
    "baton_attention": (c_void_p,) * 10 + (c_long,) * 8 + (c_float, c_int),
}


class Streams(NamedTuple):
    """Of each sequence, int32: the window it sees (0: everything) and its sinks."""

    windows: Tensor
    sinks: Tensor


class Kernels:
    def __init__(self, path: Path) -> None:
        # torch is loaded, so its OpenMP threads serve these kernels too.
        loaded = ctypes.CDLL(str(path))
        if not loaded.baton_enable():
            raise BuildError("the system does not give this process the tile registers")
        self._pack = by_dtype(loaded, "baton_pack", _SIGNATURES["baton_pack"])
        self._linear = by_dtype(loaded, "baton_linear", _SIGNATURES["baton_linear"])
        self._rms_norm = by_dtype(loaded, "baton_rms_norm", _SIGNATURES["baton_rms_norm"])
        self._rotate_and_store = by_dtype(
            loaded, "baton_rotate_and_store", _SIGNATURES["baton_rotate_and_store"]
        )
        self._attention = by_dtype(loaded, "baton_attention", _SIGNATURES["baton_attention"])
        self._copy_rows = loaded.baton_copy_rows
        self._copy_rows.argtypes = (c_void_p, c_long, c_void_p) * 2 + (c_long,) * 3 + (c_int,) * 2
        self._copy_rows.restype = c_uint64
        self.quantized_attention = QuantizedAttention(loaded)

    def pack(self, weight: Tensor) -> Tensor:
        """(outputs, depth) → its packed form, flat; see src/tiles.h. It is as deep as depth rounded
        up to 32, as its inputs will be."""
        weight = _deep(weight)
        outputs, depth = weight.shape
        packed = _WEIGHTS.empty(-(-outputs // _GROUP) * _GROUP * depth, weight.dtype)
        self._pack[weight.dtype](weight.data_ptr(), packed.data_ptr(), outputs, depth)
        return packed

    def linear(
        self, x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int, out: Tensor, how: Finish
    ) -> None:
        """x (n, depth) times packed weights of `outputs` rows, into `out`. `bias` is float32, as
        long as `outputs` rounded up to 32."""
        x = _deep(x)
        rows, depth = x.shape
        self._linear[packed.dtype](
            x.data_ptr(),
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            rows,
            outputs,
            depth,
            how,
            torch.get_num_threads(),
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """float32 (n, size) → (n, size) of `dtype`."""
        out = torch.empty(x.shape, dtype=dtype)
        x = x.contiguous()
        self._rms_norm[dtype](
            x.data_ptr(),
            weight.data_ptr(),
            eps,
            out.data_ptr(),
            *x.shape,
            torch.get_num_threads(),
        )
        return out

    def rotate_and_store(
        self,
        qkv: Tensor,
        rope: tuple[Tensor, Tensor],
        norm: Tensor | None,
        eps: float,
        slots: Tensor | None,
        slot_mapping: Tensor,
        num_heads: int,
    ) -> None:
        """See `ops.rope.rotate_and_store`."""
        tokens, all_heads, head_dim = qkv.shape
        self._rotate_and_store[qkv.dtype](
            qkv.data_ptr(),
            rope[0].data_ptr(),
            rope[1].data_ptr(),
            None if norm is None else norm.data_ptr(),
            eps,
            None if slots is None else slots[0].data_ptr(),
            None if slots is None else slots[1].data_ptr(),
            slot_mapping.data_ptr(),
            tokens,
            num_heads,
            (all_heads - num_heads) // 2,
            head_dim,
            torch.get_num_threads(),
        )

    def attention(
        self,
        q: Tensor,
        slots: Tensor,
        tables: Tensor,
        starts: Tensor,
        lengths: Tensor,
        block_size: int,
        window: int | None,
        scale: float,
        streams: Streams | None = None,
        anchored: Tensor | None = None,
    ) -> Tensor:
        """`q` (n, head, head_dim) may be a slice of wider rows; see `ops.attention`. `streams`
        takes the place of `window`; sinks are met by the queries `anchored`, shaped as `q`."""
        n, num_heads, head_dim = q.shape
        out = torch.empty(n, num_heads, head_dim, dtype=q.dtype)
        self._attention[q.dtype](
            q.data_ptr(),
            out.data_ptr(),
            slots[0].data_ptr(),
            slots[1].data_ptr(),
            tables.data_ptr(),
            starts.data_ptr(),
            lengths.data_ptr(),
            None if anchored is None else anchored.data_ptr(),
            None if streams is None else streams.windows.data_ptr(),
            None if streams is None else streams.sinks.data_ptr(),
            lengths.shape[0],
            q.stride(0),
            tables.shape[1],
            num_heads,
            slots.shape[2],
            head_dim,
            block_size,
            window or 0,
            scale,
            torch.get_num_threads(),
        )
        return out

    def copy_rows(
        self,
        source: np.ndarray,
        source_rows: np.ndarray,
        target: np.ndarray,
        target_rows: np.ndarray,
        hashed: bool,
        streamed: bool,
    ) -> int:
        """Rows (int64) of each plane in turn between arrays of bytes (plane, row, byte), whose
        rows are contiguous and a multiple of 64 bytes; the XXH3-64 of what was copied, if `hashed`:
        of more than 240 bytes. `streamed`: to a target at a multiple of 64 that nobody reads soon.
        """
        return self._copy_rows(
            source.ctypes.data,
            source.strides[0],
            source_rows.ctypes.data,
            target.ctypes.data,
            target.strides[0],
            target_rows.ctypes.data,
            len(source),
            len(source_rows),
            source.shape[2],
            hashed,
            streamed,
        )


def _deep(rows: Tensor) -> Tensor:
    """Contiguous, and padded to whole steps of depth."""
    rest = -rows.shape[1] % _DEPTH
    return F.pad(rows, (0, rest)) if rest else rows.contiguous()


def takes_linear(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and takes(weight.dtype)


def takes_heads(dtype: torch.dtype, head_dim: int) -> bool:
    """Rotary embedding and attention of heads of this size."""
    return takes(dtype) and head_dim % 2 == 0 and head_dim <= _MAX_HEAD_DIM


def takes(dtype: torch.dtype) -> bool:
    return dtype in DTYPES and kernels() is not None


@functools.cache
def kernels() -> Kernels | None:
    """The best that this CPU runs, None where there are none. The environment variable
    BATON_KERNELS may name a variant, or be `off`."""
    try:
        variants = chosen(os.environ.get("BATON_KERNELS", "auto"), supported(cpu_flags()))
    except BuildError as error:
        _log.warning("%s; torch's own kernels are used", error)
        return None
    for variant in variants:
        try:
            loaded = Kernels(library(variant))
        except (BuildError, OSError) as error:
            _log.warning("no CPU kernels (%s), torch's own are used: %s", variant, error)
        else:
            _log.info("CPU kernels: %s", variant)
            return loaded
    return None


def chosen(wish: str, possible: list[str]) -> list[str]:
    """Variants to try, in order. BuildError if the wish cannot be had."""
    if wish == "auto":
        return possible
    if wish == "off":
        return []
    if wish not in possible:
        raise BuildError(
            f"BATON_KERNELS={wish} is none of auto, off"
            + "".join(f", {name}" for name in possible)
            + ", which this CPU can run"
        )
    return [wish]
