"""KV blocks to bytes and back, with a checksum over the bytes.

Both directions touch only the blocks named, so they may run beside a forward pass that works on
other blocks. Between the caches of one host there is one copy, elsewhere one into the payload and
one out of it. A checksum is made over what the receiver's blocks then hold; blocks of a frame
that fails it never count, and are zeros again.
"""

import ctypes
from collections.abc import Iterator
from collections.abc import Sequence as ListOf

import numpy as np
import torch
import xxhash
from torch import Tensor

from baton.engine.kv_cache import KVCache
from baton.engine.kv_layout import KVLayout
from baton.engine.sequence import NO_BLOCK, Sequence
from baton.engine.transfer.base import Buffer, HandoffDamaged, Payload, SharedBlocks
from baton.engine.transfer.plan import RAW, FramePlan
from baton.engine.transfer.rows import copy_rows
from baton.engine.transfer.wire import WireForm


class SequenceReader:
    """A `BlockReader` over the blocks that a sequence holds."""

    def __init__(
        self, cache: KVCache, seq: Sequence, checksums: bool = True, ratio: int = 1
    ) -> None:
        """`ratio`: blocks of `cache` in one block of the sequence."""
        self.layout = cache.layout
        self.num_blocks = cache.num_blocks
        self.checksums = checksums
        self._cache = cache
        self._seq = seq
        self._ratio = ratio
        self._form = WireForm(cache.layout, seq.num_full_shipped(cache.layout.block_size))

    def num_bytes(self, plan: FramePlan) -> int:
        return self._form.num_bytes(plan)

    def blocks(self, plan: FramePlan) -> tuple[int, ...]:
        table = smaller_blocks(self._seq.held_blocks, self._ratio)
        return tuple([table[position] for position in plan.positions])

    def read(self, plan: FramePlan, out: Tensor) -> int | None:
        blocks, cache = self.blocks(plan), self._cache
        if plan.codec != RAW:
            unit = cache.gather(plan.layer_start, plan.layer_count, blocks)
            self._form.encode(plan, unit, out)
        elif cache.data.is_cuda:
            flat = out.view(cache.data.dtype)
            cache.gather(plan.layer_start, plan.layer_count, blocks, flat)
        else:
            planes = cache.planes(plan.layer_start, plan.layer_count)
            return copy_rows(planes, blocks, _rows_of(out, planes), None, self.checksums)
        return checksum_of(out) if self.checksums else None

    def checksum(self, plan: FramePlan) -> int | None:
        if not self.checksums:
            return None
        runs, digest = list(_runs(self.blocks(plan))), xxhash.xxh3_64()
        for plane in self._cache.planes(plan.layer_start, plan.layer_count):
            for run in runs:
                digest.update(plane[run])
        return digest.intdigest()


def smaller_blocks(table: list[int], ratio: int) -> list[int]:
    """The same blocks when each is cut into `ratio`. One that was given back is outside every
    window, so that no attention sees what is shipped for it: any other of the sequence's own."""
    if ratio == 1:
        return table
    own = next((block for block in table if block != NO_BLOCK), 0)
    whole = [own if block == NO_BLOCK else block for block in table]
    return [block * ratio + part for block in whole for part in range(ratio)]


def checksum_of(payload: Tensor) -> int:
    """Of flat bytes, wherever they are."""
    return xxhash.xxh3_64_intdigest(memoryview(payload.cpu().numpy()))  # type: ignore[arg-type]


def bytes_tensor(payload: Buffer) -> Tensor:
    """Flat bytes over the buffer's own memory: only to read, and only while it is kept."""
    array = np.frombuffer(payload, dtype=np.uint8)
    if not array.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    # torch wants a writable buffer, which a received message is not.
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
    return torch.frombuffer(memory, dtype=torch.uint8)


def num_bytes(layout: KVLayout, plan: FramePlan) -> int:
    """Of the blocks as they are."""
    return plan.layer_count * len(plan.positions) * layout.bytes_per_block // layout.num_layers


def flat_bytes(layout: KVLayout, plan: FramePlan, payload: Payload) -> Tensor:
    """The payload in one piece; a copy if it lies in the sender's cache of this layout."""
    if isinstance(payload, Tensor):
        return payload
    if not isinstance(payload, SharedBlocks):
        return bytes_tensor(payload)
    planes = _planes_of(payload, layout, plan)
    return torch.from_numpy(planes[:, list(payload.blocks)].reshape(-1))


def verify(plan: FramePlan, flat: Tensor, expected: int, checksum: int | None) -> None:
    """Raises HandoffDamaged."""
    _check_size(plan, flat, expected)
    if checksum is not None and checksum != checksum_of(flat):
        raise _damaged(plan)


def write_payload(
    cache: KVCache,
    plan: FramePlan,
    payload: Payload,
    checksum: int | None,
    block_table: ListOf[int],
) -> None:
    """Copies a payload into a sequence's blocks and verifies it; HandoffDamaged when it is not
    what was sent."""
    blocks = [block_table[position] for position in plan.positions]
    if isinstance(payload, SharedBlocks):
        source = _planes_of(payload, cache.layout, plan)
        _land(cache, plan, source, payload.blocks, checksum, blocks)
        return
    flat, expected = flat_bytes(cache.layout, plan, payload), num_bytes(cache.layout, plan)
    if cache.data.is_cuda:
        verify(plan, flat, expected, checksum)
        shape = cache.layout.unit_shape(plan.layer_count, len(blocks))
        unit = flat.view(cache.data.dtype).view(shape).to(cache.data.device)
        cache.scatter(plan.layer_start, plan.layer_count, blocks, unit)
        return
    _check_size(plan, flat, expected)
    source = _rows_of(flat, cache.planes(plan.layer_start, plan.layer_count))
    _land(cache, plan, source, None, checksum, blocks)


def _land(
    cache: KVCache,
    plan: FramePlan,
    source: np.ndarray,
    theirs: ListOf[int] | None,
    checksum: int | None,
    blocks: list[int],
) -> None:
    """Nobody reads these blocks before all is verified. Those that fail are made zeros: they may
    hold what is no number, and attention multiplies slots that it does not mean by zero."""
    target = cache.planes(plan.layer_start, plan.layer_count)
    arrived = copy_rows(source, theirs, target, blocks, checksum is not None)
    if arrived != checksum:
        target[:, blocks] = 0
        raise _damaged(plan)


def _rows_of(flat: Tensor, planes: np.ndarray) -> np.ndarray:
    """Flat bytes as rows of so many planes."""
    return flat.numpy().reshape(len(planes), -1, planes.shape[2])


def _planes_of(shared: SharedBlocks, layout: KVLayout, plan: FramePlan) -> np.ndarray:
    """The plan's layers of the sender's cache: (planes of each layer in turn, block, row)."""
    per_layer = layout.num_planes
    num_planes = per_layer * layout.num_layers
    row = layout.bytes_per_block // num_planes
    size = num_planes * shared.num_blocks * row
    if len(shared.blocks) != len(plan.positions):
        raise HandoffDamaged(f"{_name(plan)} came as {len(shared.blocks)} blocks")
    if size > shared.memory.nbytes or max(shared.blocks) >= shared.num_blocks:
        raise HandoffDamaged(f"{_name(plan)} lie outside the sender's memory")
    planes = shared.memory[:size].reshape(num_planes, shared.num_blocks, row)
    return planes[per_layer * plan.layer_start :][: per_layer * plan.layer_count]


def _check_size(plan: FramePlan, flat: Tensor, expected: int) -> None:
    if flat.numel() != expected:
        raise HandoffDamaged(f"{_name(plan)} came as {flat.numel()} bytes, {expected} expected")


def _damaged(plan: FramePlan) -> HandoffDamaged:
    return HandoffDamaged(f"{_name(plan)} fail their checksum")


def _name(plan: FramePlan) -> str:
    end, first = plan.layer_start + plan.layer_count, plan.positions[0]
    return f"{len(plan.positions)} blocks from {first} of layers [{plan.layer_start}, {end})"


def _runs(blocks: ListOf[int]) -> Iterator[slice]:
    """The longest ranges of consecutive blocks."""
    start = 0
    for end in range(1, len(blocks) + 1):
        if end == len(blocks) or blocks[end] != blocks[end - 1] + 1:
            yield slice(blocks[start], blocks[end - 1] + 1)
            start = end
