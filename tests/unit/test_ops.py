"""Each op against the plain expression that defines it."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from baton.engine.layers.rotary import RotaryEmbedding
from baton.engine.ops.activation import silu_and_mul
from baton.engine.ops.attention import AttentionBatch, DecodeGroup, paged_attention, write_kv
from baton.engine.ops.linear import Linear, TorchLinear, linear
from baton.engine.ops.norm import rms_norm
from baton.engine.ops.rope import apply_rope_
from baton.engine.rope_config import RopeConfig

DTYPES = [torch.float32, torch.bfloat16]


def close(ours: torch.Tensor, exact: torch.Tensor) -> None:
    tolerance = 1e-5 if ours.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours.float(), exact, rtol=tolerance, atol=tolerance)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 17, 193, 500])
@pytest.mark.parametrize("shape", [(576, 96), (1024, 96), (33, 70)])
@pytest.mark.parametrize("make", [linear, TorchLinear])
def test_a_product_takes_any_number_of_rows(
    dtype: torch.dtype, rows: int, shape: tuple[int, int], make: Callable[..., Linear]
) -> None:
    weight = torch.randn(shape).mul_(0.1).to(dtype)
    bias, x = torch.randn(shape[0]).to(dtype), torch.randn(rows, shape[1]).to(dtype)
    exact = x.float() @ weight.float().T
    with torch.inference_mode():
        close(make(weight)(x), exact)
        close(make(weight, bias)(x), exact + bias.float())
        total = torch.ones(rows, shape[0])
        close(make(weight, bias).add_to_(total, x).to(dtype), exact + bias.float() + 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_is_the_definition_and_leaves_its_input_alone(dtype: torch.dtype) -> None:
    x, weight = torch.randn(7, 24).to(dtype), torch.rand(24)
    before = x.clone()
    exact = x.float() / (x.float().square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    ours = rms_norm(x, weight, 1e-3)
    assert ours.dtype == dtype
    close(ours, exact)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_zeros_is_zeros(dtype: torch.dtype) -> None:
    assert not rms_norm(torch.zeros(2, 8, dtype=dtype), torch.ones(8), 1e-6).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul_gates_the_second_half_with_the_first(dtype: torch.dtype) -> None:
    x = torch.randn(5, 12).to(dtype)
    close(silu_and_mul(x), F.silu(x[:, :6].float()) * x[:, 6:].float())


def test_rope_turns_each_pair_by_the_angle_of_its_position() -> None:
    rotary = RotaryEmbedding(RopeConfig(theta=100.0), head_dim=4)
    heads = torch.randn(2, 3, 4)
    pairs = torch.complex(heads[..., :2], heads[..., 2:])
    positions = torch.tensor([0, 9])
    angles = positions[:, None] * torch.tensor([1.0, 0.1])
    turned = pairs * torch.polar(torch.ones(2, 2), angles)[:, None]
    apply_rope_(heads, *rotary(positions, torch.float32))
    close(heads, torch.cat((turned.real, turned.imag), dim=-1))


def test_rope_changes_only_the_heads_it_is_given() -> None:
    rotary = RotaryEmbedding(RopeConfig(), head_dim=4)
    qkv = torch.randn(2, 5, 4)
    before = qkv.clone()
    apply_rope_(qkv[:, :3], *rotary(torch.tensor([3, 8]), torch.float32))
    assert torch.equal(qkv[:, 3:], before[:, 3:])
    assert not torch.equal(qkv[:, :3], before[:, :3])


def test_write_kv_fills_exactly_the_mapped_slots() -> None:
    slots, kv = torch.zeros(2, 10, 1, 3), torch.randn(2, 2, 1, 3)
    write_kv(kv, slots, torch.tensor([7, 2]))
    expected = torch.zeros_like(slots)
    expected[:, 7], expected[:, 2] = kv[0], kv[1]
    assert torch.equal(slots, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_attention_is_softmax_over_the_visible_slots(dtype: torch.dtype) -> None:
    """Two sequences of 5 and 7 tokens in blocks of 4, four query heads over two KV heads."""
    table = torch.randn(2 * 6, 4 * 2 * 8).to(dtype)
    blocks, lengths = [[5, 1], [0, 3]], [5, 7]
    keys = torch.tensor(blocks).flatten()
    mask = torch.zeros(2, 1, 1, 7, dtype=dtype)
    mask[0, ..., 5:] = float("-inf")
    group = DecodeGroup(2, 7, torch.cat((keys, keys + 6)), {None: mask})
    q, kv = torch.randn(2, 4, 8).to(dtype), torch.zeros(2, 2, 2, 8, dtype=dtype)
    batch = AttentionBatch(torch.tensor([0, 0]), group)
    ours = paged_attention(q, kv, (table, table), batch, None)
    pool = table.float().view(2, 6, 4, 2, 8)
    for seq in range(2):
        k, v = pool[:, blocks[seq]].flatten(1, 2)[:, : lengths[seq]]
        for head in range(4):
            scores = k[:, head // 2] @ q[seq, head].float() / 8**0.5
            close(ours[seq, head], scores.softmax(0) @ v[:, head // 2])
