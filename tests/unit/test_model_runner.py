"""The step: what a batch-mate may change (nothing), what is read, copied and returned."""

from typing import Any

import pytest
import torch

from baton.engine.kv_cache import KVCache
from baton.engine.kv_layout import KVLayout
from baton.engine.model_runner import ModelRunner
from baton.engine.sequence import ScheduledBatch, ScheduledSequence
from tests.support.families import Rig, make_rig, random_tokens, reference_model

WINDOWED = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}


@pytest.fixture(scope="module", params=["full", "windowed"])
def reference(request: pytest.FixtureRequest) -> Any:
    return reference_model("qwen2", **(WINDOWED if request.param == "windowed" else {}))


def decoding(rig: Rig, lengths: tuple[int, ...], seed: int = 0) -> list[Any]:
    sequences = []
    for index, length in enumerate(lengths):
        seq, _ = rig.prefill(random_tokens(length, seed=seed + index), room=4)
        seq.token_ids.append(17 + index)
        sequences.append(seq)
    return sequences


def test_other_tokens_in_a_batch_mate_change_nothing(reference: Any) -> None:
    """Bit for bit: the watched sequence is the same, its mates have other tokens."""

    def run(seed: int) -> torch.Tensor:
        rig = make_rig(reference)
        watched = decoding(rig, (9,))[0]
        mates = decoding(rig, (21, 3), seed=seed)
        prompt = rig.sequence(random_tokens(13, seed=seed))
        watched_prompt = rig.sequence(random_tokens(11, seed=5))
        work = [(seq, 1) for seq in (watched, *mates)] + [(prompt, 13), (watched_prompt, 11)]
        return rig.step(*work)

    first, second = run(100), run(200)
    assert torch.equal(first[[0, 4]], second[[0, 4]])
    assert not torch.equal(first[[1, 2, 3]], second[[1, 2, 3]])


def test_a_sequence_alone_has_the_logits_it_has_in_a_batch(reference: Any) -> None:
    alone, together = make_rig(reference), make_rig(reference)
    expected = alone.step((decoding(alone, (9,))[0], 1))
    mates = decoding(together, (9, 30, 2, 14))
    logits = together.step(*((seq, 1) for seq in mates))
    torch.testing.assert_close(logits[:1], expected, rtol=0, atol=1e-5)


def test_blocks_of_others_are_never_read(reference: Any) -> None:
    """Every block outside the batch holds NaN, and no logit is NaN."""
    rig = make_rig(reference)
    sequences = decoding(rig, (9, 22, 4))
    prompt = rig.sequence(random_tokens(13, seed=8))
    prompt.num_computed_tokens = 0
    used = {block for seq in (*sequences, prompt) for block in seq.block_table}
    others = [block for block in range(rig.cache.num_blocks) if block not in used]
    rig.cache.data[:, :, others] = float("nan")
    logits = rig.step(*((seq, 1) for seq in sequences), (prompt, 6))
    logits = torch.cat((logits, rig.step((prompt, 7))))
    assert logits.isfinite().all()


def test_consecutive_blocks_give_the_same_logits_as_scattered_ones(reference: Any) -> None:
    results = []
    for scattered in (True, False):
        rig = make_rig(reference, scattered=scattered)
        if not scattered:
            rig.free.sort(reverse=True)
        seq = rig.sequence(random_tokens(18), room=2)
        rig.step((seq, 7))
        prompt_logits = rig.step((seq, 11))
        seq.token_ids.append(40)
        results.append(torch.cat((prompt_logits, rig.step((seq, 1)))))
    assert torch.equal(*results)


def test_only_items_that_reach_their_end_return_logits_in_batch_order(reference: Any) -> None:
    rig = make_rig(reference)
    decode = decoding(rig, (6,))[0]
    part, whole = rig.sequence(random_tokens(12, seed=1)), rig.sequence(random_tokens(7, seed=2))
    logits = rig.step((decode, 1), (part, 5), (whole, 7))
    assert logits.shape == (2, 101)
    lone = make_rig(reference)
    _, expected = lone.prefill(random_tokens(7, seed=2))
    torch.testing.assert_close(logits[1:], expected, rtol=0, atol=1e-5)


def test_an_empty_batch_returns_no_logits(reference: Any) -> None:
    assert make_rig(reference).runner.run(ScheduledBatch()).shape == (0, 101)


def test_block_copies_happen_before_the_forward_pass(reference: Any) -> None:
    """A fork continues in its own copy of the last block; the parent's block stays as it was."""
    rig = make_rig(reference)
    parent, fork = decoding(rig, (6, 6))
    fork.token_ids = [*parent.token_ids]
    own = fork.block_table[1]
    fork.block_table = [parent.block_table[0], own]
    expected = make_rig(reference)
    wanted = expected.step((decoding(expected, (6,))[0], 1))
    before = rig.cache.gather(0, 3, parent.block_table[:2])
    batch = ScheduledBatch([ScheduledSequence(fork, 1)], [(parent.block_table[1], own)])
    torch.testing.assert_close(rig.runner.run(batch), wanted, rtol=0, atol=1e-5)
    assert torch.equal(rig.cache.gather(0, 3, parent.block_table[:2]), before)


def test_a_forward_pass_writes_only_the_slots_of_its_tokens(reference: Any) -> None:
    rig = make_rig(reference)
    seq = rig.sequence(random_tokens(6))
    rig.step((seq, 6))
    touched = rig.cache.data.abs().sum(dim=(0, 1, 4, 5)).nonzero().tolist()
    first, second = seq.block_table
    assert sorted(touched) == sorted([[first, s] for s in range(4)] + [[second, 0], [second, 1]])


def test_kv_moved_to_another_cache_continues_with_equal_logits(reference: Any) -> None:
    here, there = make_rig(reference), make_rig(reference)
    there.free.reverse()
    seq = decoding(here, (15,))[0]
    moved = there.sequence(seq.token_ids)
    there.cache.scatter(0, 3, moved.block_table, here.cache.gather(0, 3, seq.block_table[:4]))
    moved.num_computed_tokens = 15
    assert torch.equal(there.step((moved, 1)), here.step((seq, 1)))


def test_a_cache_of_another_model_is_refused(reference: Any) -> None:
    rig = make_rig(reference)
    layout = KVLayout("", 3, 1, 8, 4, "float32", ("full",) * 3)
    with pytest.raises(ValueError, match="the KV cache is for"):
        ModelRunner(rig.runner.model, KVCache(layout, 4))
