"""Which frames carry which blocks. Plain Python: no torch, no I/O.

A frame is (layer range x blocks) of at most `max_bytes`: as many whole blocks as fit with
all their layers, or, when one block alone is larger, one block's layers in several frames.
Every (layer, block) asked for is in exactly one frame.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

DEFAULT_FRAME_BYTES = 8 << 20


@dataclass(frozen=True)
class FramePlan:
    layer_start: int
    layer_count: int
    positions: tuple[int, ...]


def plan_frames(
    positions: Sequence[int],
    num_layers: int,
    layer_block_bytes: int,
    max_bytes: int = DEFAULT_FRAME_BYTES,
) -> Iterator[FramePlan]:
    """`layer_block_bytes`: keys and values of one block in one layer."""
    blocks_per_frame = max_bytes // (num_layers * layer_block_bytes)
    if blocks_per_frame:
        for start in range(0, len(positions), blocks_per_frame):
            yield FramePlan(0, num_layers, tuple(positions[start : start + blocks_per_frame]))
        return
    layers_per_frame = max(1, max_bytes // layer_block_bytes)
    for position in positions:
        for layer in range(0, num_layers, layers_per_frame):
            yield FramePlan(layer, min(layers_per_frame, num_layers - layer), (position,))
