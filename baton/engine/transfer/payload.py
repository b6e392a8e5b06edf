"""KV blocks to bytes and back, with a checksum over the bytes.

Both directions touch only the blocks named, so they may run beside a forward pass that works on
other blocks. Between the caches of one host there is one copy, elsewhere one into the payload and
one out of it. A checksum is made over what the receiver's blocks then hold; blocks of a frame
that fails it never count.
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
from baton.engine.transfer.wire import WireForm

_CACHED_BYTES = 512 << 10
"""What one core keeps close: bytes copied a moment ago are hashed from there."""


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
        blocks = self.blocks(plan)
        if plan.codec == RAW:
            flat = out.view(self._cache.data.dtype)
            self._cache.gather(plan.layer_start, plan.layer_count, blocks, flat)
        else:
            unit = self._cache.gather(plan.layer_start, plan.layer_count, blocks)
            self._form.encode(plan, unit, out)
        return checksum_of(out) if self.checksums else None

    def checksum(self, plan: FramePlan) -> int | None:
        if not self.checksums:
            return None
        blocks, digest = self.blocks(plan), xxhash.xxh3_64()
        runs = [(start, count) for start, _, count in _runs(blocks, blocks)]
        for plane in self._cache.planes(plan.layer_start, plan.layer_count):
            for start, count in runs:
                digest.update(plane[start : start + count])
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
    if flat.numel() != expected:
        raise HandoffDamaged(f"{_name(plan)} came as {flat.numel()} bytes, {expected} expected")
    if checksum is not None:
        _compare(plan, checksum, checksum_of(flat))


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
        _copy_shared(cache, plan, payload, checksum, blocks)
    else:
        _write_flat(cache, plan, flat_bytes(cache.layout, plan, payload), checksum, blocks)


def _write_flat(
    cache: KVCache, plan: FramePlan, flat: Tensor, checksum: int | None, blocks: list[int]
) -> None:
    verify(plan, flat, num_bytes(cache.layout, plan), checksum)
    shape = cache.layout.unit_shape(plan.layer_count, len(blocks))
    tensor = flat.view(cache.data.dtype).view(shape).to(cache.data.device)
    cache.scatter(plan.layer_start, plan.layer_count, blocks, tensor)


def _copy_shared(
    cache: KVCache,
    plan: FramePlan,
    shared: SharedBlocks,
    checksum: int | None,
    blocks: list[int],
) -> None:
    """Straight from the sender's cache into this one; what has landed is then verified."""
    target = cache.planes(plan.layer_start, plan.layer_count)
    source = _planes_of(shared, cache.layout, plan)
    runs = list(_runs(shared.blocks, blocks))
    if checksum is None:
        for theirs, mine, count in runs:
            target[:, mine : mine + count] = source[:, theirs : theirs + count]
        return
    digest, step = xxhash.xxh3_64(), max(1, _CACHED_BYTES // target.shape[2])
    pieces = [
        (theirs + first, mine + first, min(step, count - first))
        for theirs, mine, count in runs
        for first in range(0, count, step)
    ]
    for into, out_of in zip(target, source, strict=True):
        for theirs, mine, count in pieces:
            piece = into[mine : mine + count]
            piece[:] = out_of[theirs : theirs + count]
            digest.update(piece)
    _compare(plan, checksum, digest.intdigest())


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


def _compare(plan: FramePlan, sent: int, arrived: int) -> None:
    if sent != arrived:
        raise HandoffDamaged(f"{_name(plan)} fail their checksum")


def _name(plan: FramePlan) -> str:
    end, first = plan.layer_start + plan.layer_count, plan.positions[0]
    return f"{len(plan.positions)} blocks from {first} of layers [{plan.layer_start}, {end})"


def _runs(theirs: ListOf[int], mine: ListOf[int]) -> Iterator[tuple[int, int, int]]:
    """(their first block, my first block, count) of the longest ranges that are consecutive in
    both lists."""
    start = 0
    for end in range(1, len(mine) + 1):
        ended = end == len(mine)
        if ended or mine[end] != mine[end - 1] + 1 or theirs[end] != theirs[end - 1] + 1:
            yield theirs[start], mine[start], end - start
            start = end
