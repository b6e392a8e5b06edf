"""The kernel that attends to quantized blocks in place, against the torch code that defines it; and
what it promises beyond it: a result does not depend on the batch around it, bit for bit."""

import dataclasses
from typing import Any

import pytest
import torch

from baton.engine.kv.codec import BlockCodec
from baton.engine.kv_layout import KVLayout
from baton.engine.masks import Streams, additive, sink_mask, visible
from baton.engine.ops import quantized_attention as ops
from baton.engine.ops.cpu import kernels as cpu
from baton.engine.ops.cpu.build import cpu_flags, library, supported
from baton.engine.ops.quantized_attention import InPlace, Masks, QuantizedDecodes, TailStore
from baton.engine.quantized_tables import QuantizedTables
from baton.engine.sampling_params import SamplingParams
from baton.engine.sequence import ScheduledSequence, Sequence

VARIANTS = supported(cpu_flags())
NEVER = 2**31 - 1


@pytest.fixture(params=VARIANTS or ["none"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not VARIANTS:
        pytest.skip("this CPU has no AVX512-BF16")
    loaded = cpu.Kernels(library(request.param))
    monkeypatch.setattr(ops, "kernels", lambda: loaded)


class Rig:
    """Sequences of so many tokens, the last of them the query; blocks and tails lie anywhere, and
    what nobody may read is no number."""

    def __init__(
        self,
        kind: str,
        lengths: list[int],
        shape: tuple[int, int, int],
        dtype: torch.dtype = torch.bfloat16,
        block: int = 16,
    ) -> None:
        torch.manual_seed(3)
        self.heads, kv_heads, dim = shape
        name = "bfloat16" if dtype is torch.bfloat16 else "float32"
        layout = KVLayout("f", 1, kv_heads, dim, block, f"{kind}/{name}", ("full",))
        assert layout.quantized is not None
        codec = BlockCodec(layout.quantized)
        self.store, self.lengths, self.block = TailStore(codec, dtype), lengths, block
        full = [(n - 1) // block for n in lengths]
        width, tails, count = max(full), layout.num_tail_blocks, len(lengths)
        ids = torch.randperm(sum(full) + count * tails + 1)
        self.table = torch.full((len(ids), layout.quantized.row_bytes), 0xFF, dtype=torch.uint8)
        kv = torch.randn(sum(full), block, 2, kv_heads, dim) + 3 * torch.randn(kv_heads, dim)
        mine = ids[: sum(full)]
        self.table[mine] = codec.encode(kv)
        rows = torch.full((count, width), int(ids[-1]))
        for row, some in zip(rows, mine.split(full), strict=True):
            row[: len(some)] = some
        tail_rows = ids[sum(full) : -1].view(count, tails)
        picked, lying = self.store.read(self.table, tail_rows)
        for seq, n in enumerate(lengths):
            own = (n - 1) % block
            lying[seq, :own] = torch.randn(own, 2, kv_heads, dim).to(dtype)
        self.store.write(self.table, tail_rows, picked)
        self.kv = torch.randn(count, 2, kv_heads, dim).to(dtype)
        self.q = torch.randn(count, self.heads, dim).to(dtype)
        self.anchored = torch.randn(count, self.heads, dim).to(dtype)
        ends = torch.tensor(lengths) - 1
        view = InPlace(torch.tensor(full), {})
        nothing = torch.empty(0, dtype=torch.long)
        self.group = QuantizedDecodes(rows, tail_rows, ends % block, view, nothing, nothing)

    def attend(self, view: Any, window: int | None = None, alone: int | None = None) -> Any:
        """Of one sequence `alone`, or of all."""
        some = slice(None) if alone is None else slice(alone, alone + 1)
        group = dataclasses.replace(
            self.group,
            rows=self.group.rows[some].contiguous(),
            tail_rows=self.group.tail_rows[some],
            slots=self.group.slots[some],
            view=view,
        )
        anchored = self.anchored[some]
        q, kv, table = self.q[some], self.kv[some], self.table.clone()
        return ops._decode(q, kv, table, self.store, group, window, None, None, anchored)

    def masks(self, window: int | None, streams: Streams | None) -> Masks:
        ends = torch.tensor(self.lengths).unsqueeze(1) - 1
        begin, width = ends // self.block * self.block, self.group.rows.shape[1]
        places = torch.arange(width * self.block).expand(len(ends), -1)
        tail = begin + torch.arange(self.block)
        seen = torch.cat((places < begin, tail <= ends), dim=1)
        places = torch.cat((places, tail), dim=1)
        mask = additive(seen & visible(places, ends, window, streams), torch.float32)
        sinks = sink_mask(ends, window, streams, torch.float32)
        return Masks(
            seen,
            {window: mask[:, None, None]},
            {window: None if sinks is None else sinks[:, None, None]},
        )


LENGTHS = [1, 16, 17, 130, 33, 200, 5]
KINDS = ("fp8", "int8", "int4")


def near(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 8e-3, "atol": 1e-3} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(9, 3, 64), (40, 1, 32), (4, 4, 96), (2, 2, 256)])
def test_blocks_and_tails_are_read_as_torch_reads_them_whoever_else_is_in_the_batch(
    kernels: None, kind: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    rig = Rig(kind, LENGTHS, shape, dtype)
    together = rig.attend(rig.group.view)
    expected = rig.attend(rig.masks(None, None))
    torch.testing.assert_close(together, expected, **near(dtype))
    for seq in range(len(LENGTHS)):
        view = InPlace(rig.group.view.num_full[seq : seq + 1], {})  # type: ignore[union-attr]
        assert torch.equal(rig.attend(view, alone=seq)[0], together[seq])


def test_before_any_block_is_full_all_lies_in_the_tails(kernels: None) -> None:
    rig = Rig("fp8", [1, 5, 16], (4, 2, 32), torch.float32)
    assert rig.group.rows.numel() == 0
    expected = rig.attend(rig.masks(None, None))
    torch.testing.assert_close(rig.attend(rig.group.view), expected, **near(torch.float32))


@pytest.mark.parametrize("block", [5, 16, 24])
@pytest.mark.parametrize("window", [1, 7, 100])
def test_a_window_hides_what_lies_before_it(kernels: None, window: int, block: int) -> None:
    rig = Rig("int8", LENGTHS, (4, 2, 32), torch.float32, block)
    ours, expected = rig.attend(rig.group.view, window), rig.attend(rig.masks(window, None), window)
    torch.testing.assert_close(ours, expected, **near(torch.float32))


def test_sinks_are_met_by_another_query_where_the_policy_is_and_others_see_all(
    kernels: None,
) -> None:
    rig = Rig("fp8", LENGTHS, (4, 2, 32), torch.float32)
    sinks, windows = [0, 0, 4, 20, 0, 4, 0], [0, 0, 10, 60, 0, 33, 0]
    streams = cpu.Streams(*(torch.tensor(n, dtype=torch.int32) for n in (windows, sinks)))
    view = InPlace(rig.group.view.num_full, {None: streams})  # type: ignore[union-attr]
    wide = torch.tensor([w or NEVER for w in windows])
    masks = rig.masks(None, Streams(torch.tensor(sinks).unsqueeze(1), wide.unsqueeze(1)))
    torch.testing.assert_close(rig.attend(view), rig.attend(masks), **near(torch.float32))


def test_every_number_of_8_bits_is_unpacked_as_torch_does(kernels: None) -> None:
    """One token of the cache, which then gets nearly all of the attention."""
    for kind, bits in (("fp8", [b for b in range(256) if b & 0x7F != 0x7F]), ("int8", range(256))):
        rig = Rig(kind, [17], (1, 1, 256), torch.float32)
        row = rig.table[rig.group.rows[0, 0]]
        *_, values = rig.store.codec.sizes.parts
        start = sum(rig.store.codec.sizes.parts) - values
        row[start : start + len(bits)] = torch.tensor(list(bits), dtype=torch.uint8)
        expected = rig.attend(rig.masks(None, None))
        torch.testing.assert_close(rig.attend(rig.group.view), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(cpu.kernels() is None, reason="no kernels here")
@pytest.mark.parametrize(
    ("kind", "head_dim", "in_place", "view"),
    [
        ("int8", 16, True, InPlace),
        ("int4", 32, True, InPlace),
        ("int8", 16, False, Masks),  # the model bends its logits, say
        ("int4", 16, True, Masks),  # half of it does not fill a vector
        ("fp8", 24, True, Masks),
    ],
)
def test_decode_steps_are_made_for_the_kernel_where_it_takes_them(
    kind: str, head_dim: int, in_place: bool, view: type
) -> None:
    layout = KVLayout("f", 1, 1, head_dim, 4, f"{kind}/float32", ("full",))
    seq = Sequence([1] * 7, SamplingParams())
    seq.block_table, seq.num_computed_tokens = [1, 2], 6
    seq.tail_blocks = list(range(3, 3 + layout.num_tail_blocks))
    batch = QuantizedTables(layout, (None,), in_place).batch([ScheduledSequence(seq, 1)], 1)
    assert batch.decodes is not None and type(batch.decodes.view) is view
