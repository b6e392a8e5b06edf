"""Blocks come back bit for bit, and moving some leaves all others alone."""

import threading

import pytest
import torch

from baton.engine.kv_cache import KVCache
from baton.engine.kv_layout import KVLayout

LAYERS, BLOCKS, SIZE, HEADS, DIM = 4, 11, 3, 2, 5


def make_cache(dtype: str = "bfloat16", filled: bool = True) -> KVCache:
    layout = KVLayout("weights", LAYERS, HEADS, DIM, SIZE, dtype, ("full",) * LAYERS)
    cache = KVCache(layout, BLOCKS)
    if filled:
        cache.data.normal_(generator=torch.Generator().manual_seed(3))
    return cache


def test_a_new_cache_is_all_zeros() -> None:
    assert not make_cache(filled=False).data.any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("layers", [(0, LAYERS), (1, 2), (3, 1)])
def test_gather_returns_the_blocks_in_the_order_asked_for(
    dtype: str, layers: tuple[int, int]
) -> None:
    cache = make_cache(dtype)
    start, count = layers
    ids = [7, 0, 10, 3]
    picked = cache.gather(start, count, ids)
    assert picked.is_contiguous()
    assert picked.shape == (count, 2, len(ids), SIZE, HEADS, DIM)
    assert torch.equal(picked, cache.data[start : start + count][:, :, ids])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_scatter_of_what_was_gathered_is_bit_equal_and_touches_nothing_else(dtype: str) -> None:
    source, target = make_cache(dtype), make_cache(dtype, filled=False)
    target.data.fill_(7)
    target.scatter(1, 2, [9, 2, 4], source.gather(1, 2, [0, 5, 6]))
    expected = torch.full_like(target.data, 7)
    expected[1:3][:, :, [9, 2, 4]] = source.data[1:3][:, :, [0, 5, 6]]
    assert torch.equal(target.data, expected)


def test_bits_that_are_not_numbers_survive_the_trip() -> None:
    source, target = make_cache(), make_cache(filled=False)
    source.data[0, 0, 1] = torch.tensor(float("nan"), dtype=torch.bfloat16)
    source.data[0, 1, 1] = -0.0
    target.scatter(0, 1, [8], source.gather(0, 1, [1]))
    moved, original = target.data[0, :, 8], source.data[0, :, 1]
    assert torch.equal(moved.view(torch.int16), original.view(torch.int16))


def test_no_blocks_gather_to_an_empty_unit_that_scatters_nothing() -> None:
    cache = make_cache()
    before = cache.data.clone()
    empty = cache.gather(0, 2, [])
    assert empty.shape == (2, 2, 0, SIZE, HEADS, DIM)
    cache.scatter(0, 2, [], empty)
    assert torch.equal(cache.data, before)


def test_copy_blocks_copies_every_layer_of_keys_and_values() -> None:
    cache = make_cache()
    expected = cache.data.clone()
    expected[:, :, [4, 9]] = expected[:, :, [1, 1]]
    cache.copy_blocks([(1, 4), (1, 9)])
    assert torch.equal(cache.data, expected)
    cache.copy_blocks([])
    assert torch.equal(cache.data, expected)


def test_a_unit_of_another_shape_or_dtype_is_refused() -> None:
    cache = make_cache()
    unit = cache.gather(0, 2, [1, 2])
    with pytest.raises(ValueError, match="does not fit"):
        cache.scatter(0, 2, [1], unit)
    with pytest.raises(ValueError, match="does not fit"):
        cache.scatter(0, 2, [1, 2], unit.float())


@pytest.mark.parametrize("ids", [[-1], [BLOCKS], [0, BLOCKS + 5]])
def test_blocks_outside_the_pool_are_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="block ids must be in"):
        make_cache().gather(0, 1, ids)


@pytest.mark.parametrize("layers", [(-1, 1), (0, 0), (0, LAYERS + 1), (LAYERS, 1)])
def test_layers_outside_the_model_are_refused(layers: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="layers"):
        make_cache().gather(*layers, [0])


def test_two_threads_on_different_blocks_do_not_disturb_each_other() -> None:
    cache = make_cache()
    mine = torch.randn(LAYERS, 2, 5, SIZE, HEADS, DIM).bfloat16()
    theirs = torch.randn(LAYERS, 2, 5, SIZE, HEADS, DIM).bfloat16()
    torn: list[int] = []

    def work(ids: list[int], unit: torch.Tensor) -> None:
        for turn in range(100):
            cache.scatter(0, LAYERS, ids, unit)
            if not torch.equal(cache.gather(0, LAYERS, ids), unit):
                torn.append(turn)

    other = threading.Thread(target=work, args=([0, 2, 4, 6, 8], theirs))
    other.start()
    work([1, 3, 5, 7, 9], mine)
    other.join(timeout=30)
    assert not other.is_alive()
    assert not torn
