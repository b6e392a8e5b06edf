"""Quantized blocks: what comes back, how far it may be off, and how many bytes it takes."""

import pytest
import torch

from baton.engine.kv.codec import BlockCodec
from baton.engine.kv.numbers import Quantized, dequantize, quantize, quantize_around_mean
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


def fp8_bound(keys: torch.Tensor, q: Quantized) -> torch.Tensor:
    """1/16 of the distance from the mean, or half of e4m3's smallest number; and float32's own."""
    assert q.zero is not None
    distance = (keys - q.zero.float()).abs()
    return torch.maximum(distance / 16, q.scale.float() * 2**-10) * 1.001 + keys.abs() * 2**-22


SHAPE = (3, SIZE, HEADS, DIM)
ODD = {
    "a channel far from zero": lambda x: x + 1000 * (torch.arange(DIM) == 1),
    "a channel ten thousand times larger": lambda x: x * (1 + 9999 * (torch.arange(DIM) == 1)),
    "one outlier": lambda x: x + 3e4 * (torch.rand(SHAPE) > 0.99),
    "huge": lambda x: x * 1e6,
    "tiny": lambda x: x * 1e-6,
    "subnormal": lambda x: x * 1e-40,
    "one sign": lambda x: 1e5 + x.abs(),
}


@pytest.mark.parametrize("name", ODD)
def test_fp8_keys_come_back_within_a_16th_of_their_distance_from_their_channels_mean(
    name: str,
) -> None:
    torch.manual_seed(0)
    keys = ODD[name](torch.randn(SHAPE))
    q = quantize_around_mean(keys, 1, 3)
    assert q.scale.shape == (3, 1, HEADS, 1) and q.zero is not None
    assert q.zero.shape == (3, 1, HEADS, DIM)
    error = (dequantize(q, "fp8") - keys).abs()
    assert (error <= fp8_bound(keys, q)).all()


def test_constant_fp8_channels_are_exact_beside_others_and_whatever_the_sign_of_zero() -> None:
    torch.manual_seed(0)
    keys = torch.randn(2, SIZE, HEADS, DIM)
    constants = torch.tensor([3.25, -1000.0, 0.0, -0.0, 2.0**-20])
    keys[..., :5] = constants
    keys[0, ::2, :, 3] = 0.0
    back = dequantize(quantize_around_mean(keys, 1, 3), "fp8")
    assert torch.equal(back[..., :5], constants.expand(2, SIZE, HEADS, 5))


@pytest.mark.parametrize("largest", [1e9, 3.4e38, float("inf")])
def test_fp8_keys_beyond_every_scale_end_at_the_largest_and_keep_their_sign(largest: float) -> None:
    keys = torch.randn(2, SIZE, HEADS, DIM).sign() * largest
    keys[:, :, :, 0] = largest
    back = dequantize(quantize_around_mean(keys, 1, 3), "fp8")
    assert back.isfinite().all() and torch.equal(back.sign(), keys.sign())
    assert (back.abs() > 2.8e7).all()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_number_spoils_neither_other_heads_nor_other_blocks(kind: str) -> None:
    kv = blocks()
    whole = codec(kind).decode(codec(kind).encode(kv))
    kv[1, 3, 0, 2, 4] = float("nan")
    back = codec(kind).decode(codec(kind).encode(kv))
    assert back[1, 3, 0, 2, 4].isnan()
    sound = torch.ones(5, HEADS, dtype=torch.bool)
    sound[1, 2] = False
    assert torch.equal(back[:, :, 0].transpose(1, 2)[sound], whole[:, :, 0].transpose(1, 2)[sound])
    assert torch.equal(back[:, :, 1], whole[:, :, 1])


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


def test_keys_around_their_mean_err_less_than_with_a_scale_per_channel() -> None:
    """Channels of real keys lie farther from zero than they vary: three times less, measured."""
    torch.manual_seed(0)
    keys = torch.randn(20, 16, 3, 64) + 2 * torch.randn(3, 64)
    around = dequantize(quantize_around_mean(keys, 1, 3), "fp8") - keys
    scaled = dequantize(quantize(keys, "fp8", 1), "fp8") - keys
    assert around.square().mean() < scaled.square().mean() / 3


def test_a_channel_with_outliers_makes_scales_per_token_worse_than_per_channel_at_int4() -> None:
    keys = torch.randn(20, 16, 3, 64, generator=torch.Generator().manual_seed(1))
    keys[..., 5] *= 12
    error = {
        d: (dequantize(quantize(keys, "int4", d), "int4") - keys).square().mean() for d in (1, 3)
    }
    assert error[1] < error[3] / 4


@pytest.mark.parametrize(
    ("kind", "row_bytes", "most"),
    [("fp8", 6632, 0.54), ("int8", 6624, 0.54), ("int4", 3792, 0.32)],
)
def test_a_block_of_smollm2_takes_its_share_of_the_bytes_of_bfloat16(
    kind: str, row_bytes: int, most: float
) -> None:
    row = QuantizedSizes(kind, 16, 3, 64).row_bytes
    assert row == row_bytes and row % 8 == 0
    assert row / (2 * 16 * 3 * 64 * 2) <= most


def test_the_bytes_of_an_fp8_block_are_these() -> None:
    """Known answer: one head of two channels, two tokens. Keys 7, 9 and -1, 1 lie 1 from their
    means, 8 and 0, at 256 times the scale; rounding up takes that to the float16 after 1/256."""
    kv = torch.tensor([[[7.0, -1.0], [256.0, 16.0]], [[9.0, 1.0], [-1.0, 0.5]]])
    row = BlockCodec(QuantizedSizes("fp8", 2, 1, 2)).encode(kv.view(1, 2, 2, 1, 2))
    scales = torch.tensor([2.0**-8 * (1 + 2.0**-10), 1 + 2.0**-10, 2.0**-8 * (1 + 2.0**-10)])
    means = torch.tensor([8.0, 0.0])
    numbers = torch.tensor([-256.0, -256, 256, 256, 256, 16, -256, 128])
    wanted = [
        torch.cat((scales, means)).half().view(torch.uint8),
        numbers.to(torch.float8_e4m3fn).view(torch.uint8),
    ]
    assert row[0, :18].tolist() == torch.cat(wanted).tolist()
    assert row.shape == (1, 24) and not row[0, 18:].any()


def test_sizes_that_cannot_be_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"one of fp8, int8, int4, not 'int2'"):
        QuantizedSizes("int2", 16, 3, 64)
    with pytest.raises(ValueError, match=r"head_dim \(5\) must be even"):
        QuantizedSizes("int4", 16, 3, 5)
