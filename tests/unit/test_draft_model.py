"""A draft model beside its target: the same tokens, far fewer steps when it is good."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.engine.llm import LLM
from baton.engine.sampling_params import SamplingParams
from baton.engine.speculation.draft_model import Ahead, DraftingRunner
from baton.engine.speculation.drafting import Drafting
from tests.support.drafts import Free
from tests.support.families import random_tokens
from tests.support.tiny import VOCAB, write_tiny_llama

PROMPTS = [random_tokens(length, length, VOCAB) for length in (1, 17, 40)]
SAMPLINGS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=4, max_tokens=40, n=3, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, seed=5, max_tokens=33, top_p=0.9, min_tokens=10, logprobs=2),
]


@pytest.fixture(scope="module")
def other_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("other"), seed=1)


def llm_with(target: Path, draft: Path, tokens: int = 4, **values: Any) -> LLM:
    llm = LLM(target, "float32", speculate=f"draft({draft}, tokens={tokens})", **values)
    llm.engine.scheduler.drafting = Drafting(Ahead, tokens, Free())
    return llm


def answers(llm: LLM) -> list[list[list[int]]]:
    choices = llm.generate(PROMPTS, SAMPLINGS)
    return [[choice.token_ids for choice in group] for group in choices]


@pytest.mark.parametrize(
    ("kv_dtype", "num_blocks"), [("auto", 512), ("auto", 22), ("int8", 512), ("int8", 36)]
)
def test_a_draft_model_changes_no_token_good_or_bad_with_and_without_preemption(
    tiny_llama: Path, other_llama: Path, kv_dtype: str, num_blocks: int
) -> None:
    values: dict[str, Any] = {"num_blocks": num_blocks, "block_size": 8, "kv_dtype": kv_dtype}
    wanted = answers(LLM(tiny_llama, "float32", **values))
    shares = []
    for draft in (tiny_llama, other_llama):
        llm = llm_with(tiny_llama, draft, **values)
        assert answers(llm) == wanted
        drafting = llm.engine.scheduler.drafting
        assert drafting is not None and drafting.tokens_drafted > 50
        shares.append(drafting.tokens_accepted / drafting.tokens_drafted)
        llm.engine.blocks.check_integrity([])
        assert (llm.engine.scheduler.num_preemptions > 0) == (num_blocks < 512)
    assert shares[0] > 0.9 > 0.3 > shares[1]


def test_the_same_model_as_draft_is_always_right_and_saves_steps(tiny_llama: Path) -> None:
    llm = llm_with(tiny_llama, tiny_llama, tokens=4)
    ((choice,),) = llm.generate([PROMPTS[1]], SAMPLINGS[0])
    drafting = llm.engine.scheduler.drafting
    assert drafting is not None
    assert drafting.tokens_accepted == drafting.tokens_drafted == 31
    assert len(choice.tokens) == 40


def test_a_pool_too_small_for_all_shadows_gives_some_no_drafts(tiny_llama: Path) -> None:
    llm = llm_with(tiny_llama, tiny_llama, block_size=8)
    runner = llm.engine._runner
    assert isinstance(runner, DraftingRunner)
    blocks = runner._draft_model._blocks
    blocks.allocate(blocks.num_blocks - 11)
    assert answers(llm) == answers(LLM(tiny_llama, "float32", block_size=8))
    drafting = llm.engine.scheduler.drafting
    assert drafting is not None and drafting.tokens_accepted > 0


def test_a_draft_model_of_another_vocabulary_is_refused_by_the_name_of_the_setting(
    tiny_llama: Path, tmp_path: Path
) -> None:
    other = write_tiny_llama(tmp_path)
    (other / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    with pytest.raises(ValueError, match=r"--speculate: the draft model .* another vocabulary"):
        LLM(tiny_llama, "float32", speculate=f"draft({other})")
