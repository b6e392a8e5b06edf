"""The paged KV cache: one tensor (layer, plane, block, slot, kv_head, head_dim), the planes being
key and value, or the latent alone; or (layer, 1, block, byte) if it is quantized.

Owns the memory, not the blocks: the block manager says which block belongs to whom. `gather`,
`scatter` and `copy_blocks` may run in another thread than the forward pass as long as the two
touch different blocks; they share no scratch. The memory starts as zeros because attention
multiplies the slots past a sequence's end by a weight of zero.
"""

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.kv_layout import KVLayout

__all__ = ["KVCache", "KVLayout"]

# Runs of blocks are copied as such from here on; shorter ones cost more calls than they save.
_MIN_RUN_BYTES = 64 << 10

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class KVCache:
    def __init__(self, layout: KVLayout, num_blocks: int, device: str = "cpu") -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        self.layout = layout
        self.num_blocks = num_blocks
        shape = layout.unit_shape(layout.num_layers, num_blocks)
        dtype = DTYPES[layout.dtype] if layout.quantized is None else torch.uint8
        self.data = _zeros(shape, dtype, device)
        self.layers: tuple[Tensor, ...] = tuple(self.data.unbind(0))
        """Per layer (plane, block, slot, kv_head, head_dim)."""
        self.slots: tuple[Tensor, ...] = tuple(layer.flatten(1, 2) for layer in self.layers)
        """Per layer (plane, block * block_size + slot, kv_head, head_dim)."""
        self.tables: tuple[Tensor, ...] = tuple(x.flatten(2).flatten(0, 1) for x in self.layers)
        """Per layer (blocks of each plane in turn, block_size * kv_head * head_dim)."""
        self._table = self.data.view(-1, self.tables[0].shape[1])
        row_bytes = self._table.shape[1] * self._table.element_size()
        # index_copy_ moves one element at a time, so wide elements move faster.
        self._word = torch.int64 if row_bytes % 8 == 0 else self.data.dtype

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
        with torch.inference_mode():
            ids = self._ids(block_ids)
            first, end = self._planes(layer_start, layer_count)
            planes = torch.arange(first, end)
            rows = planes.to(ids.device).mul_(self.num_blocks).unsqueeze(1) + ids
            # Rows of one flat table: index_select copies whole rows fastest along dimension 0.
            shaped = None if out is None else out.view(rows.numel(), self._table.shape[1])
            picked = torch.index_select(self._table, 0, rows.flatten(), out=shaped)
        return picked.view(self.layout.unit_shape(layer_count, len(block_ids)))

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
        if not block_ids:
            return
        with torch.inference_mode():
            planes = self._table.view(-1, self.num_blocks, self._table.shape[1])
            first, end = self._planes(layer_start, layer_count)
            target = planes[first:end]
            source = tensor.reshape(end - first, len(block_ids), -1)
            ids, runs = self._ids(block_ids), _runs(block_ids)
            if tensor.nbytes < len(runs) * _MIN_RUN_BYTES:
                target.view(self._word).index_copy_(1, ids, source.view(self._word))
                return
            for start, stop in runs:
                block = block_ids[start]
                target[:, block : block + stop - start].copy_(source[:, start:stop])

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks (source, target) in every layer. No target is also a source."""
        if not pairs:
            return
        sources = [source for source, _ in pairs]
        targets = [target for _, target in pairs]
        num_layers = self.layout.num_layers
        self.scatter(0, num_layers, targets, self.gather(0, num_layers, sources))

    def _planes(self, layer_start: int, layer_count: int) -> tuple[int, int]:
        """Range of the layers' planes among those of all layers."""
        planes = self.layout.num_planes
        return planes * layer_start, planes * (layer_start + layer_count)

    def _check_layers(self, layer_start: int, layer_count: int) -> None:
        if layer_start < 0 or layer_count < 1:
            raise ValueError(f"no layers [{layer_start}, {layer_start + layer_count})")
        if layer_start + layer_count > self.layout.num_layers:
            raise ValueError(
                f"layers [{layer_start}, {layer_start + layer_count}) are beyond "
                f"the model's {self.layout.num_layers}"
            )

    def _ids(self, block_ids: Sequence[int]) -> Tensor:
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < self.num_blocks:
            raise ValueError(f"block ids must be in [0, {self.num_blocks}): {list(block_ids)}")
        return torch.tensor(block_ids, dtype=torch.int64, device=self.data.device)


def _runs(block_ids: Sequence[int]) -> list[tuple[int, int]]:
    """Longest ranges [start, end) of the list in which each id is one more than the last."""
    breaks = [i for i in range(1, len(block_ids)) if block_ids[i] != block_ids[i - 1] + 1]
    return list(zip([0, *breaks], [*breaks, len(block_ids)], strict=True))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Zeros; on a CPU in huge pages where the system has them, which attention reads faster
    because the blocks of a sequence lie apart. Pages become resident when first written."""
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Kernels built without huge pages refuse the advice; plain pages are as correct.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
