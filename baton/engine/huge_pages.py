"""Memory in huge pages, where the system has them, for what a step reads at large: weights and
KV blocks. Every small page costs a look-up of its address, on a virtual machine two.
"""

import contextlib
import mmap
import threading

import torch
from torch import Tensor

_CHUNK = 32 << 20
_LINE = 64


def mapped(num_bytes: int) -> Tensor:
    """Flat uint8 zeros in a mapping of their own, which lives as long as they do. Pages become
    resident when first written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, num_bytes, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Kernels built without huge pages refuse the advice; plain pages are as correct.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Arena:
    """Tensors that last, side by side: the weights of a layer may be smaller than a huge page.
    A mapping goes when all tensors in it have gone. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = torch.empty(0, dtype=torch.uint8)

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """(count,) of `dtype`, at a multiple of 64 bytes."""
        num_bytes = count * dtype.itemsize
        padded = -(-num_bytes // _LINE) * _LINE
        with self._lock:
            if padded > len(self._rest):
                self._rest = mapped(max(padded, _CHUNK))
            part, self._rest = self._rest[:num_bytes], self._rest[padded:]
        return part.view(dtype)
