"""Quantized blocks: what comes back, how far it may be off, and how many bytes it takes."""

import pytest
import torch

from baton.engine.kv.codec import BlockCodec
from baton.engine.kv.numbers import dequantize, quantize
from baton.engine.kv.quantized_sizes import QuantizedSizes

KINDS = ("fp8", "int8", "int4")
SIZE, HEADS, DIM = 8, 3, 10


def codec(kind: str) -> BlockCodec:
    return BlockCodec(QuantizedSizes(kind, SIZE, HEADS, DIM))


def blocks(count: int = 5, seed: int = 0) -> torch.Tensor:
    """Keys with channels far from zero, one of them constant; values of all magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(count, SIZE, 2, HEADS, DIM, generator=generator)
    kv[:, :, 0, :, 1] += 40
    kv[:, :, 0, :, 2] = 3.25
    kv[:, :, 1] *= 10.0 ** torch.arange(-3, SIZE - 3).view(1, SIZE, 1, 1)
    kv[0, :, :, 0] = 0
    return kv


@pytest.mark.parametrize("kind", KINDS)
def test_every_value_comes_back_within_its_bound(kind: str) -> None:
    for dim, x in ((1, blocks()[:, :, 0]), (3, blocks()[:, :, 1])):
        q = quantize(x, kind, dim)
        error = (dequantize(q, kind) - x).abs()
        scale = q.scale.float().expand_as(x)
        # Half a step; of fp8 1/16 of the value, or half of its smallest number, 2**-9.
        bound = torch.maximum(x.abs() / 16, scale * 2**-10) if kind == "fp8" else scale / 2
        assert (error <= bound * 1.001).all()


@pytest.mark.parametrize("kind", KINDS)
def test_scales_are_no_larger_than_the_range_needs(kind: str) -> None:
    keys = blocks()[1:, :, 0]
    scale = quantize(keys, kind, 1).scale.float()
    largest, span = keys.abs().amax(1, True), keys.amax(1, True) - keys.amin(1, True)
    needed = {
        "fp8": largest / 256,
        "int8": largest / 127,
        "int4": torch.maximum(span / 14, largest / 120),
    }[kind]
    assert (scale >= needed).all()
    assert (scale <= needed * 1.003 + 2**-23).all()


def test_numbers_that_lie_close_together_come_back_from_fp8_within_a_28th() -> None:
    """Scaled to e4m3's largest they took its widest steps: a perplexity 0.5 % higher."""
    channel = torch.linspace(9.0, 10.0, 200)
    error = (dequantize(quantize(channel, "fp8", 0), "fp8") - channel).abs()
    assert (error / channel).max() < 1 / 28


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_come_back_as_zeros_and_no_bytes_mean_zeros(kind: str) -> None:
    zeros = torch.zeros(2, SIZE, 2, HEADS, DIM)
    assert not codec(kind).decode(codec(kind).encode(zeros)).any()
    assert (
        not codec(kind).decode(torch.zeros(1, codec(kind).sizes.row_bytes, dtype=torch.uint8)).any()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_depends_on_its_block_alone_and_decodes_to_the_same_bits(kind: str) -> None:
    kv = blocks()
    rows = codec(kind).encode(kv)
    assert rows.shape == (5, codec(kind).sizes.row_bytes) and rows.dtype == torch.uint8
    for index in range(5):
        assert torch.equal(codec(kind).encode(kv[index : index + 1])[0], rows[index])
    together = codec(kind).decode(rows)
    assert together.shape == kv.shape and together.dtype == torch.float32
    assert torch.equal(codec(kind).decode(rows[3:4])[0], together[3])
    assert torch.equal(codec(kind).decode(rows.clone()), together)


@pytest.mark.parametrize("kind", KINDS)
def test_no_block_is_encoded_to_no_row(kind: str) -> None:
    rows = codec(kind).encode(torch.empty(0, SIZE, 2, HEADS, DIM))
    assert codec(kind).decode(rows).shape == (0, SIZE, 2, HEADS, DIM)


def test_a_channel_with_outliers_makes_scales_per_token_worse_than_per_channel_at_int4() -> None:
    keys = torch.randn(20, 16, 3, 64, generator=torch.Generator().manual_seed(1))
    keys[..., 5] *= 12
    error = {
        d: (dequantize(quantize(keys, "int4", d), "int4") - keys).square().mean() for d in (1, 3)
    }
    assert error[1] < error[3] / 4


@pytest.mark.parametrize(("kind", "most"), [("fp8", 0.54), ("int8", 0.54), ("int4", 0.32)])
def test_a_block_of_smollm2_takes_its_share_of_the_bytes_of_bfloat16(
    kind: str, most: float
) -> None:
    row = QuantizedSizes(kind, 16, 3, 64).row_bytes
    assert row % 8 == 0
    assert row / (2 * 16 * 3 * 64 * 2) <= most


def test_sizes_that_cannot_be_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"one of fp8, int8, int4, not 'int2'"):
        QuantizedSizes("int2", 16, 3, 64)
    with pytest.raises(ValueError, match=r"head_dim \(5\) must be even"):
        QuantizedSizes("int4", 16, 3, 5)
