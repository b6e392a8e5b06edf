"""KV blocks to bytes and back, with a checksum over the bytes.

Both directions touch only the blocks named, so they may run beside a forward pass that
works on other blocks. No copy but the one from blocks to payload and the one back.
"""

import ctypes
from collections.abc import Sequence as ListOf

import numpy as np
import torch
import xxhash
from torch import Tensor

from baton.engine.kv_cache import KVCache
from baton.engine.sequence import Sequence
from baton.engine.transfer.base import Buffer, HandoffDamaged, KVFrame
from baton.engine.transfer.plan import FramePlan


class SequenceReader:
    """A `BlockReader` over the blocks that a sequence holds."""

    def __init__(self, cache: KVCache, seq: Sequence, checksums: bool = True) -> None:
        self._cache = cache
        self._seq = seq
        self._checksums = checksums

    def num_bytes(self, plan: FramePlan) -> int:
        layout = self._cache.layout
        return plan.layer_count * len(plan.positions) * layout.bytes_per_block // layout.num_layers

    def read(self, plan: FramePlan, out: Tensor) -> int | None:
        table = self._seq.held_blocks
        blocks = [table[position] for position in plan.positions]
        flat = out.view(self._cache.data.dtype)
        self._cache.gather(plan.layer_start, plan.layer_count, blocks, flat)
        return checksum_of(out) if self._checksums else None


def checksum_of(payload: Tensor) -> int:
    """Of flat bytes, wherever they are."""
    return xxhash.xxh3_64_intdigest(memoryview(payload.cpu().numpy()))  # type: ignore[arg-type]


def num_bytes(payload: Buffer | Tensor) -> int:
    return payload.nbytes if isinstance(payload, Tensor) else memoryview(payload).nbytes


def bytes_tensor(payload: Buffer) -> Tensor:
    """Flat bytes over the buffer's own memory: only to read, and only while it is kept."""
    array = np.frombuffer(payload, dtype=np.uint8)
    if not array.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    # torch wants a writable buffer, which a received message or a read-only mapping is not.
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
    return torch.frombuffer(memory, dtype=torch.uint8)


def write_frame(cache: KVCache, frame: KVFrame, block_table: ListOf[int]) -> None:
    """Verifies a frame and copies it into a sequence's blocks."""
    payload = frame.payload
    flat = payload if isinstance(payload, Tensor) else bytes_tensor(payload)
    shape = cache.layout.unit_shape(frame.layer_count, len(frame.positions))
    expected = cache.data.element_size() * torch.Size(shape).numel()
    if flat.numel() != expected:
        raise HandoffDamaged(
            f"frame {frame.sequence} has {flat.numel()} bytes, {expected} expected"
        )
    if frame.checksum is not None and checksum_of(flat) != frame.checksum:
        raise HandoffDamaged(f"frame {frame.sequence} fails its checksum")
    blocks = [block_table[position] for position in frame.positions]
    tensor = flat.view(cache.data.dtype).view(shape).to(cache.data.device)
    cache.scatter(frame.layer_start, frame.layer_count, blocks, tensor)
