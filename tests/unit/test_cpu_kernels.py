"""Our CPU kernels, each variant that this machine runs, against the torch code that defines them;
and what they promise beyond it: a result does not depend on the batch around it, bit for bit."""

import random
import shutil
import threading
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from baton.engine.layers.rotary import RotaryEmbedding
from baton.engine.ops.activation import Activation, gelu_tanh_and_mul, silu_and_mul
from baton.engine.ops.cpu import build
from baton.engine.ops.cpu.build import BuildError, cpu_flags, library, supported
from baton.engine.ops.cpu.kernels import Finish, Kernels, chosen
from baton.engine.ops.linear import ACTIVATIONS, GATES, KernelGated, KernelLinear
from baton.engine.ops.rope import apply_rope_
from baton.engine.rope_config import RopeConfig

VARIANTS = supported(cpu_flags())
NOT_A_NUMBER = float("nan")

needs_kernels = pytest.mark.skipif(not VARIANTS, reason="this CPU has no AVX512-BF16")


@pytest.fixture(scope="module", params=VARIANTS or ["none"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if not VARIANTS:
        pytest.skip("this CPU has no AVX512-BF16")
    return Kernels(library(request.param))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


def noise(dtype: torch.dtype, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape).mul_(scale).to(dtype)


def near(dtype: torch.dtype, rtol: float, atol: float) -> dict[str, float]:
    """What a bfloat16 may be off by; a float32 keeps 16 bits more."""
    exact = dtype is torch.float32
    return {"rtol": 1e-5, "atol": 1e-5} if exact else {"rtol": rtol, "atol": atol}


SHAPES = [(960, 576), (100, 48), (33, 1536), (7, 30)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 32, 45, 300])
def test_a_product_is_summed_in_float32(
    kernels: Kernels, dtype: torch.dtype, rows: int, shape: tuple[int, int]
) -> None:
    weight, bias = noise(dtype, *shape, scale=0.05), noise(dtype, shape[0])
    x = noise(dtype, rows, shape[1])
    product = KernelLinear(kernels, weight, bias)
    exact = (x.double() @ weight.double().T + bias.double()).float()
    torch.testing.assert_close(product.unrounded(x), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(product(x).float(), exact, **near(dtype, 1e-2, 1e-2))
    total = torch.randn(rows, shape[0])
    expected = total + exact
    torch.testing.assert_close(product.add_to_(total, x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activate", [silu_and_mul, gelu_tanh_and_mul])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_gate_and_up_are_multiplied_without_being_rounded(
    kernels: Kernels, dtype: torch.dtype, rows: int, activate: Activation
) -> None:
    weight, bias = noise(dtype, 96, 64, scale=0.3), noise(dtype, 96)
    x = noise(dtype, rows, 64)
    exact = activate(x.float() @ weight.float().T + bias.float())
    ours = KernelGated(kernels, weight, bias, GATES[activate])(x)
    torch.testing.assert_close(ours.float(), exact, **near(dtype, 5e-3, 1e-4))


@pytest.mark.parametrize("activate", ACTIVATIONS)
def test_a_product_is_activated_before_it_is_rounded(
    kernels: Kernels, dtype: torch.dtype, activate: Activation
) -> None:
    weight, bias, x = noise(dtype, 100, 64), noise(dtype, 100), noise(dtype, 5, 64, scale=0.3)
    exact = activate(x.float() @ weight.float().T + bias.float())
    ours = KernelLinear(kernels, weight, bias).finished(x, ACTIVATIONS[activate])
    torch.testing.assert_close(ours.float(), exact, **near(dtype, 5e-3, 1e-4))


@pytest.mark.parametrize("gate", GATES.values())
def test_a_gate_far_from_zero_neither_overflows_nor_is_lost(
    kernels: Kernels, dtype: torch.dtype, gate: Finish
) -> None:
    x = torch.tensor([[256.0], [-256.0], [-(2.0**60)]]) * torch.eye(1, 32)
    weight = torch.ones(32, 32).to(dtype)
    ours = KernelGated(kernels, weight, None, gate)(x.to(dtype))
    assert ours[0].tolist() == [65536.0] * 16
    assert ours[1:].tolist() == [[0.0] * 16] * 2


def test_a_row_of_a_product_is_the_same_among_any_others(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    x, weight = noise(dtype, 300, 576), noise(dtype, 96, 576, scale=0.05)
    for product in (
        KernelLinear(kernels, weight).unrounded,
        KernelLinear(kernels, weight),
        KernelGated(kernels, weight, None, Finish.SILU_AND_MUL),
    ):
        together = product(x)
        for row in (0, 15, 16, 31, 255, 256, 299):
            for count in range(1, 14):
                assert torch.equal(product(x[row : row + count]), together[row : row + count])


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_a_packed_matrix_are_read_back(
    kernels: Kernels, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    weight, some = noise(dtype, *shape), torch.randint(shape[0], (50,))
    rows = KernelLinear(kernels, weight).rows(some)
    assert torch.equal(rows, weight[some]) and rows.is_contiguous()


@pytest.mark.parametrize("size", [576, 100])
def test_the_norm_is_its_definition(kernels: Kernels, dtype: torch.dtype, size: int) -> None:
    x, weight = torch.randn(70, size), torch.rand(size)
    exact = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    ours = kernels.rms_norm(x, weight, 1e-3, dtype)
    torch.testing.assert_close(ours.float(), exact, **near(dtype, 5e-3, 1e-5))
    assert torch.equal(kernels.rms_norm(x[41:42], weight, 1e-3, dtype), ours[41:42])


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("head_dim", [6, 16, 64, 80])
def test_keys_are_rotated_into_their_slots_and_values_copied(
    kernels: Kernels, dtype: torch.dtype, head_dim: int, normed: bool
) -> None:
    heads, kv_heads, tokens = 4, 2, 40
    qkv = noise(dtype, tokens, heads + 2 * kv_heads, head_dim)
    slots = torch.zeros(2, 50, 2, head_dim).to(dtype)
    norm = torch.rand(heads + kv_heads, head_dim) if normed else None
    where = torch.randperm(50)[:tokens]
    rope = RotaryEmbedding(RopeConfig(), head_dim)(torch.arange(tokens), torch.float32)
    exact = qkv.float().clone()
    if norm is not None:
        scale = exact[:, :6].square().mean(-1, keepdim=True).add(1e-5).rsqrt()
        exact[:, :6] *= scale * norm
    apply_rope_(exact[:, : heads + kv_heads], *rope)
    kernels.rotate_and_store(qkv, rope, norm, 1e-5, slots, where, heads)
    close = near(dtype, 5e-3, 1e-3)
    torch.testing.assert_close(qkv[:, :heads].float(), exact[:, :heads], **close)
    torch.testing.assert_close(slots[0, where].float(), exact[:, heads:6], **close)
    assert torch.equal(slots[1, where].float(), exact[:, 6:])
    others = torch.ones(50, dtype=torch.bool)
    others[where] = False
    assert not slots[:, others].any()


class Paged:
    """Sequences of (queries, context) whose blocks lie anywhere; what nobody may read is NaN."""

    def __init__(
        self, dtype: torch.dtype, work: list[tuple[int, int]], kv_heads: int, dim: int, block: int
    ) -> None:
        counts = [-(-context // block) for _, context in work]
        blocks = list(range(sum(counts) + 1))
        random.Random(1).shuffle(blocks)
        self.block, self.work = block, work
        self.slots = torch.full((2, len(blocks) * block, kv_heads, dim), NOT_A_NUMBER).to(dtype)
        self.tables = torch.full((len(work), max(counts)), -1, dtype=torch.int32)
        self.places: list[torch.Tensor] = []
        for seq, ((_, context), count) in enumerate(zip(work, counts, strict=True)):
            mine = [blocks.pop() for _ in range(count)]
            self.tables[seq, :count] = torch.tensor(mine)
            place = torch.cat([torch.arange(b * block, (b + 1) * block) for b in mine])[:context]
            self.slots[:, place] = noise(dtype, 2, context, kv_heads, dim)
            self.places.append(place)
        self.starts = torch.tensor([0, *accumulate(n for n, _ in work)], dtype=torch.int32)
        self.lengths = torch.tensor([context for _, context in work], dtype=torch.int32)

    def attend(self, kernels: Kernels, q: torch.Tensor, window: int | None) -> torch.Tensor:
        scale = q.shape[-1] ** -0.5
        shape = (self.tables, self.starts, self.lengths)
        return kernels.attention(q, self.slots, *shape, self.block, window, scale)

    def last_alone(
        self, kernels: Kernels, q: torch.Tensor, seq: int, window: int | None
    ) -> torch.Tensor:
        """The last query of a sequence, as a decode step of nothing else computes it."""
        last = int(self.starts[seq + 1]) - 1
        shape = (self.tables[seq : seq + 1].contiguous(), torch.tensor([0, 1], dtype=torch.int32))
        return kernels.attention(
            q[last : last + 1],
            self.slots,
            *shape,
            self.lengths[seq : seq + 1].contiguous(),
            self.block,
            window,
            q.shape[-1] ** -0.5,
        )[0]

    def expected(self, q: torch.Tensor, seq: int, window: int | None) -> torch.Tensor:
        queries, context = self.work[seq]
        group = q.shape[1] // self.slots.shape[2]
        keys, values = self.slots[:, self.places[seq]].float().repeat_interleave(group, 2)
        mine = q[self.starts[seq] : self.starts[seq + 1]].float()
        scores = torch.einsum("nhd,thd->hnt", mine, keys) * q.shape[-1] ** -0.5
        at, to = torch.arange(context - queries, context).unsqueeze(1), torch.arange(context)
        visible = (to <= at) & (to > at - (window or context))
        scores = scores.masked_fill(~visible, float("-inf"))
        return torch.einsum("hnt,thd->nhd", scores.softmax(-1), values)


@pytest.mark.parametrize("window", [None, 7, 100])
@pytest.mark.parametrize("block", [5, 16])
@pytest.mark.parametrize("shape", [(9, 3, 64), (4, 4, 80), (40, 1, 32), (2, 2, 256), (4, 2, 10)])
def test_attention_reads_what_is_visible_and_a_query_is_the_same_decoded_or_prefilled(
    kernels: Kernels,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    block: int,
    window: int | None,
) -> None:
    heads, kv_heads, dim = shape
    work = [(1, 1), (1, 130), (5, 5), (40, 200), (1, 33), (150, 150), (17, 64)]
    paged = Paged(dtype, work, kv_heads, dim, block)
    q = noise(dtype, sum(n for n, _ in work), heads + 2 * kv_heads, dim)[:, :heads]
    together = paged.attend(kernels, q, window)
    for seq in range(len(work)):
        ours = together[paged.starts[seq] : paged.starts[seq + 1]]
        expected = paged.expected(q, seq, window)
        torch.testing.assert_close(ours.float(), expected, **near(dtype, 2e-2, 1e-2))
        assert torch.equal(ours[-1], paged.last_alone(kernels, q, seq, window))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_changes_nothing(
    kernels: Kernels, dtype: torch.dtype, threads: int
) -> None:
    paged, before = Paged(dtype, [(70, 90), (1, 40)], 3, 64, 16), torch.get_num_threads()
    q, x = noise(dtype, 71, 9, 64), noise(dtype, 70, 64)
    product = KernelLinear(kernels, noise(dtype, 96, 64))
    expected = (paged.attend(kernels, q, None), product.unrounded(x))
    try:
        torch.set_num_threads(threads)
        ours = (paged.attend(kernels, q, None), product.unrounded(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(ours[0], expected[0])
    assert torch.equal(ours[1], expected[1])


def test_what_a_cpu_runs_is_read_from_its_flags() -> None:
    server = frozenset(["avx512_bf16", "avx512bw", "avx512vl", "avx512dq", "avx512_vbmi2"])
    assert supported(frozenset(["avx2"])) == []
    assert supported(server) == ["avx512"]
    assert supported(server | {"amx_tile", "amx_bf16"}) == ["amx", "avx512"]


def test_the_user_may_choose_a_variant_or_none() -> None:
    assert chosen("auto", ["amx", "avx512"]) == ["amx", "avx512"]
    assert chosen("avx512", ["amx", "avx512"]) == ["avx512"]
    assert chosen("off", ["amx"]) == []
    with pytest.raises(BuildError, match="BATON_KERNELS=neon is none of auto, off, amx"):
        chosen("neon", ["amx"])


@needs_kernels
def test_a_machine_without_a_compiler_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        library(VARIANTS[0])


@needs_kernels
def test_a_failing_compiler_leaves_its_words_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_TARGETS", {VARIANTS[0]: ("-march=abacus",)})
    with pytest.raises(BuildError, match="abacus"):
        library(VARIANTS[0])
    assert not list((tmp_path / "kernels").iterdir())


@needs_kernels
def test_two_that_build_at_once_get_the_same_library_and_a_third_does_not_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    built: list[Path] = []
    builders = [
        threading.Thread(target=lambda: built.append(library(VARIANTS[0]))) for _ in range(2)
    ]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(120)
    monkeypatch.setenv("CXX", "/nowhere")
    assert built == [library(VARIANTS[0])] * 2
    Kernels(built[0])


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("variant", build.VARIANTS)
def test_a_bundle_has_every_variant_whatever_this_cpu_is_and_is_found_first(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "VARIANTS", {variant: build.VARIANTS[variant]})
    monkeypatch.setattr(build, "cpu_flags", frozenset)
    package = tmp_path / "lib"
    monkeypatch.setattr(build, "_folders", lambda: [package, tmp_path / "home"])
    assert build.main(["--bundle"]) == 0
    assert [path.parent for path in package.iterdir()] == [package]
    monkeypatch.setenv("CXX", "/nowhere")
    assert library(variant).parent == package


def test_a_bundle_that_cannot_be_built_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "_folders", lambda: [tmp_path])
    monkeypatch.setenv("CXX", "/nowhere")
    assert build.main(["--bundle"]) == 1
    assert "/nowhere" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
