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
from baton.engine.transfer.base import HandoffDamaged, SharedBlocks
from baton.engine.transfer.payload import SequenceReader, write_payload
from baton.engine.transfer.plan import FramePlan, split


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
    whole = FramePlan(3, num_layers, tuple(sorted(positions)))
    plans = list(split(whole, layer_block_bytes, max_bytes))
    units = [
        (layer, position)
        for plan in plans
        for layer in range(plan.layer_start, plan.layer_start + plan.layer_count)
        for position in plan.positions
    ]
    assert sorted(units) == sorted((la, p) for la in range(3, 3 + num_layers) for p in positions)
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


def read(source: KVCache, plan: FramePlan, table: list[int]) -> tuple[bytes, int | None]:
    seq = Sequence([1], SamplingParams())
    seq.block_table = table
    reader = SequenceReader(source, seq)
    payload = torch.empty(reader.num_bytes(plan), dtype=torch.uint8)
    checksum = reader.read(plan, payload)
    return bytes(payload.numpy()), checksum


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_frame_moves_blocks_bit_for_bit_to_other_places(dtype: str) -> None:
    source, target = cache(dtype, 1), cache(dtype)
    plan = FramePlan(1, 2, (0, 2))
    write_payload(target, plan, *read(source, plan, [5, 6, 7]), [9, 0, 3])
    for theirs, mine in ((5, 9), (7, 3)):
        assert torch.equal(source.data[1:, :, theirs], target.data[1:, :, mine])
    untouched = [b for b in range(10) if b not in (9, 3)]
    assert not target.data[:, :, untouched].any() and not target.data[0].any()


@pytest.mark.parametrize("byte", [0, 777, -1])
def test_a_flipped_bit_anywhere_is_noticed_before_anything_is_written(byte: int) -> None:
    source, target = cache(seed=1), cache()
    plan = FramePlan(0, 3, (0, 1))
    payload, checksum = read(source, plan, [1, 2])
    damaged = bytearray(payload)
    damaged[byte] ^= 1
    with pytest.raises(HandoffDamaged, match="checksum"):
        write_payload(target, plan, damaged, checksum, [1, 2])
    assert not target.data.any()


def test_a_frame_of_the_wrong_size_is_refused_with_both_sizes() -> None:
    source, target = cache(seed=1), cache("float32")
    plan = FramePlan(0, 3, (0, 1))
    with pytest.raises(HandoffDamaged, match="1536 bytes, 3072 expected"):
        write_payload(target, plan, *read(source, plan, [1, 2]), [1, 2])


def shared(source: KVCache, blocks: tuple[int, ...]) -> SharedBlocks:
    memory = source.data.view(-1).view(torch.uint8).numpy()
    return SharedBlocks(memory, source.num_blocks, blocks)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("table", [[5, 6, 7], [9, 0, 3], [2, 3, 1]])
def test_blocks_of_shared_memory_move_bit_for_bit_in_one_copy(dtype: str, table: list[int]) -> None:
    source, target = cache(dtype, 1), cache(dtype)
    seq = Sequence([1], SamplingParams())
    seq.block_table = [4, 5, 8]
    reader, plan = SequenceReader(source, seq), FramePlan(1, 2, (0, 1, 2))
    payload = shared(source, reader.blocks(plan))
    checksum = reader.checksum(plan)
    assert checksum == read(source, plan, [4, 5, 8])[1]
    write_payload(target, plan, payload, checksum, table)
    assert torch.equal(source.data[1:][:, :, [4, 5, 8]], target.data[1:][:, :, table])
    untouched = [b for b in range(10) if b not in table]
    assert not target.data[:, :, untouched].any() and not target.data[0].any()


def test_shared_blocks_that_have_changed_since_they_were_named_are_noticed() -> None:
    source, target = cache(seed=1), cache()
    seq = Sequence([1], SamplingParams())
    seq.block_table = [4, 5]
    plan = FramePlan(0, 3, (0, 1))
    checksum = SequenceReader(source, seq).checksum(plan)
    source.data[2, 1, 5, 3, 1, 7] += 1
    with pytest.raises(HandoffDamaged, match="checksum"):
        write_payload(target, plan, shared(source, (4, 5)), checksum, [1, 2])


@pytest.mark.parametrize(
    ("num_blocks", "blocks", "reason"),
    [(10, (4, 10), "outside"), (11, (4, 5), "outside"), (10, (4,), "came as 1 blocks")],
)
def test_shared_blocks_outside_the_senders_memory_are_refused(
    num_blocks: int, blocks: tuple[int, ...], reason: str
) -> None:
    source, target = cache(seed=1), cache()
    payload = dataclasses.replace(shared(source, blocks), num_blocks=num_blocks)
    with pytest.raises(HandoffDamaged, match=reason):
        write_payload(target, FramePlan(0, 3, (0, 1)), payload, None, [1, 2])
    assert not target.data.any()
