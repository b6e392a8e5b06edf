"""The paged KV cache: one tensor (layer, plane, block, slot, kv_head, head_dim), the planes being
key and value, or the latent alone; or (layer, 1, block, byte) if it is quantized.

Owns the memory, not the blocks: the block manager says which block belongs to whom. `gather`,
`scatter` and `copy_blocks` may run in another thread than the forward pass as long as the two
touch different blocks; they share no scratch. The memory starts as zeros because attention
multiplies the slots past a sequence's end by a weight of zero.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from baton.engine.huge_pages import mapped
from baton.engine.kv_layout import KVLayout

__all__ = ["KVCache", "KVLayout"]

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class KVCache:
    """`memory`: flat bytes to live in, zeros at first, exactly as many as the blocks take."""

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: str = "cpu",
        memory: Tensor | None = None,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        self.layout = layout
        self.num_blocks = num_blocks
        shape = layout.unit_shape(layout.num_layers, num_blocks)
        dtype = DTYPES[layout.dtype] if layout.quantized is None else torch.uint8
        self.data = (
            _zeros(shape, dtype, device) if memory is None else memory.view(dtype).view(shape)
        )
        self.layers: tuple[Tensor, ...] = tuple(self.data.unbind(0))
        """Per layer (plane, block, slot, kv_head, head_dim)."""
        self.slots: tuple[Tensor, ...] = tuple(layer.flatten(1, 2) for layer in self.layers)
        """Per layer (plane, block * block_size + slot, kv_head, head_dim)."""
        self.tables: tuple[Tensor, ...] = tuple(x.flatten(2).flatten(0, 1) for x in self.layers)
        """Per layer (blocks of each plane in turn, block_size * kv_head * head_dim)."""
        self._bytes = self.data.flatten(3).view(torch.uint8).flatten(0, 1)
        """(planes of each layer in turn, block, bytes of its row)."""
        self._planes = None if self.data.is_cuda else self._bytes.numpy()

    def in_blocks_of(self, block_size: int) -> "KVCache":
        """The same memory as a cache of smaller blocks: block b becomes the blocks b * r to
        b * r + r - 1, because the slots of a block lie side by side."""
        ratio, rest = divmod(self.layout.block_size, block_size)
        if ratio == 1:
            return self
        if rest or self.layout.quantized is not None:
            raise ValueError(
                f"blocks of {self.layout.block_size} tokens are no blocks of {block_size}"
            )
        layout = replace(self.layout, block_size=block_size)
        flat = self.data.view(-1).view(torch.uint8)
        return KVCache(layout, self.num_blocks * ratio, memory=flat)

    def planes(self, layer_start: int, layer_count: int) -> np.ndarray:
        """Bytes of a cache on a CPU: (planes of each layer in turn, block, bytes of its row)."""
        assert self._planes is not None
        self._check_layers(layer_start, layer_count)
        per_layer = self.layout.num_planes
        return self._planes[per_layer * layer_start : per_layer * (layer_start + layer_count)]

    @property
    def bytes_per_token(self) -> int:
        return self.layout.bytes_per_token

    def gather(
        self,
        layer_start: int,
        layer_count: int,
        block_ids: Sequence[int],
        out: Tensor | None = None,
    ) -> Tensor:
        """A contiguous copy of the blocks, shape `layout.unit_shape`; in `out` if given, which
        is flat, as long as the copy and on the cache's device."""
        self._check_layers(layer_start, layer_count)
        self._check_ids(block_ids)
        shape = self.layout.unit_shape(layer_count, len(block_ids))
        if out is None:
            out = torch.empty(math.prod(shape), dtype=self.data.dtype, device=self.data.device)
        rows = self._rows(layer_start, layer_count)
        flat = out.view(torch.uint8).view(len(rows), len(block_ids), rows.shape[2])
        if self.data.is_cuda:
            torch.index_select(rows, 1, torch.tensor(block_ids, device=rows.device), out=flat)
        elif block_ids:
            # numpy copies whole rows; "clip" spares it a buffer, and the ids are checked.
            np.take(rows.numpy(), block_ids, axis=1, out=flat.numpy(), mode="clip")
        return out.view(self.data.dtype).view(shape)

    def scatter(
        self, layer_start: int, layer_count: int, block_ids: Sequence[int], tensor: Tensor
    ) -> None:
        """Writes what `gather` of an equal layout returned."""
        self._check_layers(layer_start, layer_count)
        shape = self.layout.unit_shape(layer_count, len(block_ids))
        if tuple(tensor.shape) != shape or tensor.dtype != self.data.dtype:
            raise ValueError(
                f"KV of shape {tuple(tensor.shape)} {tensor.dtype} does not fit "
                f"{shape} {self.data.dtype}"
            )
        self._check_ids(block_ids)
        if not block_ids:
            return
        rows = self._rows(layer_start, layer_count)
        flat = tensor.reshape(-1).view(torch.uint8).view(len(rows), len(block_ids), -1)
        if self.data.is_cuda:
            rows.index_copy_(1, torch.tensor(block_ids, device=rows.device), flat)
        else:
            rows.numpy()[:, block_ids] = flat.numpy()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks (source, target) in every layer. No target is also a source."""
        if not pairs:
            return
        sources = [source for source, _ in pairs]
        targets = [target for _, target in pairs]
        num_layers = self.layout.num_layers
        self.scatter(0, num_layers, targets, self.gather(0, num_layers, sources))

    def _check_layers(self, layer_start: int, layer_count: int) -> None:
        if layer_start < 0 or layer_count < 1:
            raise ValueError(f"no layers [{layer_start}, {layer_start + layer_count})")
        if layer_start + layer_count > self.layout.num_layers:
            raise ValueError(
                f"layers [{layer_start}, {layer_start + layer_count}) are beyond "
                f"the model's {self.layout.num_layers}"
            )

    def _rows(self, layer_start: int, layer_count: int) -> Tensor:
        self._check_layers(layer_start, layer_count)
        planes = self.layout.num_planes
        return self._bytes[planes * layer_start : planes * (layer_start + layer_count)]

    def _check_ids(self, block_ids: Sequence[int]) -> None:
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < self.num_blocks:
            raise ValueError(f"block ids must be in [0, {self.num_blocks}): {list(block_ids)}")


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Zeros; on a CPU in huge pages, because the blocks of a sequence lie apart."""
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return mapped(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
