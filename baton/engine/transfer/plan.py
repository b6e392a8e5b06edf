"""Which frames carry which blocks. Plain Python: no torch, no I/O.

A frame is (layer range x blocks) of at most `max_bytes`: as many whole layers as fit with all
their blocks, or, when one layer alone is larger, one layer's blocks in several frames. Blocks of
one layer lie side by side in both caches, so few layers of many blocks are copied fastest.
Every (layer, block) asked for is in exactly one frame.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

RAW = "raw"
"""The codec of blocks that travel as they are."""


@dataclass(frozen=True)
class FramePlan:
    """`positions` count blocks of the prompt from 0, ascending; `codec` is how those that are full
    are written in the payload."""

    layer_start: int
    layer_count: int
    positions: tuple[int, ...]
    codec: str = RAW


def split(plan: FramePlan, layer_block_bytes: int, max_bytes: int) -> Iterator[FramePlan]:
    """`layer_block_bytes`: keys and values of one block in one layer."""
    units = max(1, max_bytes // layer_block_bytes)
    if not plan.positions:
        return
    layers = max(1, units // len(plan.positions))
    blocks = max(1, units // layers)
    for start in range(0, plan.layer_count, layers):
        count = min(layers, plan.layer_count - start)
        part = replace(plan, layer_start=plan.layer_start + start, layer_count=count)
        for first in range(0, len(plan.positions), blocks):
            yield replace(part, positions=plan.positions[first : first + blocks])


def cut(plan: FramePlan, num_bytes: Callable[[FramePlan], int], max_bytes: int) -> list[FramePlan]:
    """As `split`, of a plan in whatever form `num_bytes` counts: the last block may be written
    another way than the first."""
    if num_bytes(plan) <= max_bytes:
        return [plan]
    ends = (plan.positions[0], plan.positions[-1])
    unit = max(num_bytes(FramePlan(0, 1, (position,), plan.codec)) for position in ends)
    return list(split(plan, unit, max_bytes))
