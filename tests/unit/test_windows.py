"""Models whose layers all have a window: blocks that no layer sees are given back, no others."""

import itertools
import random
from typing import Any

import pytest
import torch

from baton.engine.block_manager import BlockManager
from baton.engine.llm import LLM
from baton.engine.model_config import ModelConfig
from baton.engine.sampling_params import SamplingParams
from baton.engine.sequence import NO_BLOCK, Sequence
from tests.support.families import SIZES, reference_model
from tests.support.toy import run_to_end, solo, texts, toy_engine

GREEDY = SamplingParams(temperature=0, max_tokens=60)


def tokens(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(97), k=length)


def sequence(manager: BlockManager, length: int) -> Sequence:
    """All of whose tokens are computed."""
    seq = Sequence(tokens(length), GREEDY)
    seq.block_table = manager.allocate(manager.blocks_for(length))
    seq.num_computed_tokens = length
    manager.publish_computed(seq)
    return seq


def config(model_type: str, **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({"model_type": model_type, **SIZES, **changes})


def test_only_a_model_without_a_full_layer_gives_blocks_back() -> None:
    assert config("mistral", sliding_window=9).widest_window == 9
    assert config("llama").widest_window is None
    assert config("gemma2", sliding_window=9).widest_window is None, "full layers keep everything"


@pytest.mark.parametrize(
    ("window", "computed", "outside"),
    # The token after `computed` sees positions computed - window + 1 and later.
    [(1, 7, 1), (1, 8, 2), (4, 6, 0), (4, 7, 1), (5, 7, 0), (5, 8, 1), (9, 20, 3), (99, 20, 0)],
)
def test_a_block_is_given_back_when_its_last_token_leaves_the_window(
    window: int, computed: int, outside: int
) -> None:
    manager = BlockManager(8, 4, window=window)
    seq = sequence(manager, computed)
    table = list(seq.block_table)
    manager.give_back_outside(seq)
    assert seq.num_outside_blocks == outside
    assert seq.block_table == [NO_BLOCK] * outside + table[outside:]
    manager.check_integrity([seq.block_table])
    manager.give_back_outside(seq)
    manager.check_integrity([seq.block_table])
    manager.release_sequence(seq)
    assert manager.num_free == 8


def test_a_block_that_another_sequence_still_sees_stays_held() -> None:
    manager = BlockManager(8, 4, window=4)
    seq = sequence(manager, 8)
    other = seq.fork(1)
    manager.acquire(other.block_table)
    manager.give_back_outside(seq)
    manager.check_integrity([seq.block_table, other.block_table])
    manager.release_sequence(seq)
    manager.release_sequence(other)
    assert manager.num_free == 8


def test_a_prefix_is_reused_when_only_what_its_next_token_sees_is_left_of_it() -> None:
    manager = BlockManager(6, 4, window=6)
    seq = sequence(manager, 24)
    table = list(seq.block_table)
    manager.release_sequence(seq)
    evicted = manager.allocate(3)
    assert set(evicted) == set(table[3:]), "the end of a prefix goes first"
    again = Sequence(tokens(24), GREEDY)
    assert manager.reusable_prefix(again) == [NO_BLOCK, *table[1:3]], "block 0 is outside at 12"
    # Without block 1 no prefix is long enough to do without it.
    manager.acquire([table[0], table[2]])
    manager.allocate(1)
    assert manager.reusable_prefix(again) == [table[0]]


def test_what_a_hand_off_need_not_bring_is_outside_every_window_or_cached() -> None:
    manager = BlockManager(16, 4, window=6)
    new = Sequence(tokens(22), GREEDY)
    assert manager.known_of_handoff(new) == [NO_BLOCK] * 4, "the next token sees 17 and later"
    seq = sequence(manager, 22)
    assert manager.known_of_handoff(new) == [NO_BLOCK] * 4 + seq.block_table[4:5]
    assert BlockManager(16, 4).known_of_handoff(new) == []


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(("ours", "theirs"), [(4, 4), (4, 16), (16, 4), (1, 2)])
def test_what_a_hand_off_ships_is_held_whatever_the_two_block_sizes(
    ours: int, theirs: int, cached: bool
) -> None:
    """Decode asks for whole blocks of its own size, of which the windows see a part. Prefill gave
    smaller ones of them back after a chunk, or never had them beside a cached prefix."""
    for window, length in itertools.product((6, 30), range(1, 70)):
        prefill, decode = (BlockManager(128, size, window=window) for size in (ours, theirs))
        if cached:
            prefill.release_sequence(sequence(prefill, length))
        seq = Sequence(tokens(length), GREEDY)
        seq.peer_block_size = theirs
        reused = prefill.reusable_prefix(seq)
        prefill.reuse(reused)
        seq.block_table = reused + prefill.allocate(prefill.blocks_for(length) - len(reused))
        for computed in range(len(reused) * ours, length + 1):
            seq.num_computed_tokens = computed
            prefill.give_back_outside(seq)
        first = len(decode.known_of_handoff(Sequence(tokens(length), GREEDY))) * theirs
        assert NO_BLOCK not in seq.block_table[first // ours :]
        prefill.check_integrity([seq.block_table])
        if ours >= theirs:
            assert seq.num_outside_blocks == prefill.num_outside(length), "no more than that"


def test_endless_text_holds_no_more_blocks_than_its_window() -> None:
    engine, _ = toy_engine(num_blocks=64, window=9)
    seq = Sequence(tokens(30), GREEDY)
    engine.add(seq)
    most, outputs = 0, []
    while engine.scheduler.has_work():
        outputs += engine.step() or []
        if seq.num_output_tokens > 1 and seq.block_table:
            most = max(most, engine.blocks.num_blocks - engine.blocks.num_free)
    assert most == 3, "9 tokens lie in at most 3 blocks of 4"
    assert texts(outputs)[seq.group, 0] == solo(tokens(30), GREEDY, 9)[0]
    assert engine.blocks.num_free == 64


def test_a_prompt_whose_beginning_was_evicted_is_still_a_hit() -> None:
    engine, runner = toy_engine(num_blocks=12, window=6)
    for seed in (0, 1, 0):
        engine.add(Sequence(tokens(24, seed), SamplingParams(temperature=0, max_tokens=1)))
        outputs = run_to_end(engine)
        expected = solo(tokens(24, seed), SamplingParams(temperature=0, max_tokens=1), 6)
        assert texts(outputs).popitem()[1] == expected[0]
        # The second time this evicts what the first prompt gave back before its end.
        engine.blocks.release(engine.blocks.allocate(3))
    assert runner.tokens_computed == 24 + 24 + 4, "of the last prompt only its last block"


def test_a_windowed_model_in_a_small_pool_writes_what_the_reference_writes(tmp_path: Any) -> None:
    """96 tokens of output in a pool of 40: only with blocks given back do two sequences fit."""
    reference = reference_model("mistral", spread=0.4, sliding_window=7)
    reference.save_pretrained(tmp_path)
    llm = LLM(tmp_path, "float32", num_blocks=32, block_size=4, chunk_size=8, max_num_seqs=4)
    prompts = [tokens(n, n) for n in (3, 21, 30)]
    sampling = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    found = llm.generate(prompts, sampling)
    for prompt, (choice,) in zip(prompts, found, strict=True):
        with torch.inference_mode():
            expected = reference.generate(
                torch.tensor([prompt]), max_new_tokens=90, min_new_tokens=90, do_sample=False
            )
        assert choice.token_ids == expected[0, len(prompt) :].tolist()
    assert llm.engine.scheduler.num_preemptions == 0, "together they would need 90 blocks"
    assert llm.engine.blocks.num_free == 32


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_layers_that_see_everything_keep_what_lies_before_the_window_of_others(
    tmp_path: Any, kv_dtype: str
) -> None:
    """vllm-project/vllm#49795: the window was applied to layers declared full. Prompts that differ
    in their first token, eight windows back, in bf16 and over an int8 cache, cold and cached."""
    reference = reference_model("gemma2", spread=0.4)
    reference.save_pretrained(tmp_path)
    shape: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "chunk_size": 8, "max_num_seqs": 4}
    llm = LLM(tmp_path, "bfloat16", **shape, kv_dtype=kv_dtype)
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    same = tokens(39)
    found = [llm.generate([[first, *same]], sampling)[0][0] for first in (5, 90, 5)]
    scores = [[token.logprob for token in choice.tokens] for choice in found]
    assert max(abs(a - b) for a, b in zip(scores[0], scores[1], strict=True)) > 0.01
    assert scores[2] == pytest.approx(scores[0], abs=0.05), "the second time much of it is cached"
    assert llm.engine.blocks.window is None, "no block is given back while a layer sees it"
