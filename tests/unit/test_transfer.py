"""Frames: planned once over, read and written without a bit lost."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.kv_cache import KVCache
from baton.engine.kv_layout import KVLayout
from baton.engine.sampling_params import SamplingParams
from baton.engine.sequence import Sequence
from baton.engine.transfer.base import HandoffDamaged, KVFrame
from baton.engine.transfer.payload import SequenceReader, write_frame
from baton.engine.transfer.plan import FramePlan, plan_frames


@settings(max_examples=200, deadline=None)
@given(
    st.sets(st.integers(0, 200), max_size=60),
    st.integers(1, 40),
    st.integers(1, 5000),
    st.integers(1, 100_000),
)
def test_every_layer_of_every_block_is_in_exactly_one_frame_of_bounded_size(
    positions: set[int], num_layers: int, layer_block_bytes: int, max_bytes: int
) -> None:
    plans = list(plan_frames(sorted(positions), num_layers, layer_block_bytes, max_bytes))
    units = [
        (layer, position)
        for plan in plans
        for layer in range(plan.layer_start, plan.layer_start + plan.layer_count)
        for position in plan.positions
    ]
    assert sorted(units) == sorted((la, p) for la in range(num_layers) for p in positions)
    for plan in plans:
        size = plan.layer_count * len(plan.positions) * layer_block_bytes
        assert size <= max(max_bytes, layer_block_bytes)


def cache(dtype: str = "bfloat16", seed: int | None = None) -> KVCache:
    layout = KVLayout("f", 3, 2, 8, 4, dtype, ("full",) * 3)
    result = KVCache(layout, 10)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        result.data.copy_(torch.randn(result.data.shape, generator=generator))
    return result


def read_frame(source: KVCache, plan: FramePlan, table: list[int], sequence: int) -> KVFrame:
    seq = Sequence([1], SamplingParams())
    seq.block_table = table
    reader = SequenceReader(source, seq)
    payload = torch.empty(reader.num_bytes(plan), dtype=torch.uint8)
    checksum = reader.read(plan, payload)
    where = (sequence, plan.layer_start, plan.layer_count, plan.positions)
    return KVFrame(*where, bytes(payload.numpy()), checksum)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_frame_moves_blocks_bit_for_bit_to_other_places(dtype: str) -> None:
    source, target = cache(dtype, 1), cache(dtype)
    plan = FramePlan(1, 2, (0, 2))
    frame = read_frame(source, plan, [5, 6, 7], 0)
    write_frame(target, frame, [9, 0, 3])
    for theirs, mine in ((5, 9), (7, 3)):
        assert torch.equal(source.data[1:, :, theirs], target.data[1:, :, mine])
    untouched = [b for b in range(10) if b not in (9, 3)]
    assert not target.data[:, :, untouched].any() and not target.data[0].any()


@pytest.mark.parametrize("byte", [0, 777, -1])
def test_a_flipped_bit_anywhere_is_noticed_before_anything_is_written(byte: int) -> None:
    source, target = cache(seed=1), cache()
    frame = read_frame(source, FramePlan(0, 3, (0, 1)), [1, 2], 0)
    payload = bytearray(frame.payload)
    payload[byte] ^= 1
    with pytest.raises(HandoffDamaged, match="checksum"):
        write_frame(target, dataclasses.replace(frame, payload=payload), [1, 2])
    assert not target.data.any()


def test_a_frame_of_the_wrong_size_is_refused_with_both_sizes() -> None:
    source, target = cache(seed=1), cache("float32")
    frame = read_frame(source, FramePlan(0, 3, (0, 1)), [1, 2], 0)
    with pytest.raises(HandoffDamaged, match="1536 bytes, 3072 expected"):
        write_frame(target, frame, [1, 2])
