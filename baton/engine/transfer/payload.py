"""KV blocks to bytes and back, with a checksum over the bytes.

Both directions touch only the blocks named, so they may run beside a forward pass that
works on other blocks.
"""

from collections.abc import Sequence

import torch
import xxhash

from baton.engine.kv_cache import KVCache
from baton.engine.transfer.base import HandoffDamaged, KVFrame
from baton.engine.transfer.plan import FramePlan


def read_frame(
    cache: KVCache, plan: FramePlan, block_table: Sequence[int], sequence: int
) -> KVFrame:
    """Copies the planned part of a sequence's blocks into a frame."""
    blocks = [block_table[position] for position in plan.positions]
    tensor = cache.gather(plan.layer_start, plan.layer_count, blocks).cpu()
    payload = memoryview(tensor.view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]
    checksum = xxhash.xxh3_64_intdigest(payload)
    return KVFrame(sequence, plan.layer_start, plan.layer_count, plan.positions, payload, checksum)


def write_frame(cache: KVCache, frame: KVFrame, block_table: Sequence[int]) -> None:
    """Verifies a frame and copies it into a sequence's blocks."""
    shape = cache.layout.unit_shape(frame.layer_count, len(frame.positions))
    expected = cache.data.element_size() * torch.Size(shape).numel()
    size = memoryview(frame.payload).nbytes
    if size != expected:
        raise HandoffDamaged(f"frame {frame.sequence} has {size} bytes, {expected} expected")
    if xxhash.xxh3_64_intdigest(frame.payload) != frame.checksum:
        raise HandoffDamaged(f"frame {frame.sequence} fails its checksum")
    # torch refuses read-only buffers, hence the copy.
    flat = torch.frombuffer(bytearray(frame.payload), dtype=cache.data.dtype)
    blocks = [block_table[position] for position in frame.positions]
    tensor = flat.view(shape).to(cache.data.device)
    cache.scatter(frame.layer_start, frame.layer_count, blocks, tensor)
