"""Beam search: the beams and scores of transformers, blocks shared, steps taken together."""

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.beam_search import BeamSearch
from baton.engine.llm import LLM
from baton.engine.sampling_params import BeamParams, SamplingParams
from baton.engine.sequence import FinishReason
from tests.support.families import random_tokens, reference_model

EOS = 2


@pytest.fixture(scope="module")
def reference() -> Any:
    """Weights that make the end token likely enough to end beams at many lengths."""
    model = reference_model("llama", seed=4, spread=0.3)
    with torch.no_grad():
        model.lm_head.weight[EOS] *= 1.5
    return model


@pytest.fixture(scope="module")
def folder(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("beams")
    reference.save_pretrained(path)
    return path


def expected(
    reference: Any, prompt: list[int], n: int, beam: BeamParams, max_tokens: int
) -> list[tuple[list[int], float]]:
    """Tokens, without padding, and score of the n best."""
    with torch.no_grad():
        found = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=beam.width,
            num_return_sequences=n,
            length_penalty=beam.length_penalty,
            early_stopping=beam.early_stopping,
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=EOS,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    answers = []
    for row, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompt) :]
        end = tokens.index(EOS) + 1 if EOS in tokens else len(tokens)
        answers.append((tokens[:end], score))
    return answers


def params(n: int, beam: BeamParams, max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, n=n, max_tokens=max_tokens, beam=beam)


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -1.0, 2.0])
@pytest.mark.parametrize("width", [2, 4])
def test_beams_and_scores_are_those_of_transformers(
    reference: Any, folder: Path, width: int, length_penalty: float, early_stopping: Any
) -> None:
    llm = LLM(folder, "float32", num_blocks=128, block_size=4, max_num_seqs=8)
    beam = BeamParams(width, length_penalty, early_stopping)
    prompts = [random_tokens(n, n) for n in (3, 16, 29)]
    found = llm.generate(prompts, params(width, beam, 24))
    lengths = set()
    for prompt, choices in zip(prompts, found, strict=True):
        wanted = expected(reference, prompt, width, beam, 24)
        assert [choice.token_ids for choice in choices] == [tokens for tokens, _ in wanted]
        for choice, (tokens, score) in zip(choices, wanted, strict=True):
            total = sum(token.logprob or 0.0 for token in choice.tokens)
            assert total / len(tokens) ** length_penalty == pytest.approx(score, rel=1e-5, abs=1e-4)
            ended = tokens[-1] == EOS
            assert choice.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
            lengths.add(len(tokens))
    assert llm.engine.blocks.num_free == 128
    llm.engine.blocks.check_integrity([])


def test_the_best_of_more_beams_than_asked_for_are_returned(reference: Any, folder: Path) -> None:
    llm = LLM(folder, "float32", num_blocks=128, block_size=4, max_num_seqs=8)
    beam, prompt = BeamParams(5), random_tokens(9, 1)
    (choices,) = llm.generate([prompt], params(2, beam, 12))
    wanted = expected(reference, prompt, 2, beam, 12)
    assert [choice.token_ids for choice in choices] == [tokens for tokens, _ in wanted]


def test_one_token_is_a_search_too(reference: Any, folder: Path) -> None:
    llm = LLM(folder, "float32", num_blocks=128, block_size=4, max_num_seqs=8)
    beam, prompt = BeamParams(3), random_tokens(9, 1)
    (choices,) = llm.generate([prompt], params(3, beam, 1))
    assert [c.token_ids for c in choices] == [t for t, _ in expected(reference, prompt, 3, beam, 1)]


@pytest.mark.parametrize("num_blocks", [18, 24])
def test_a_pool_too_small_for_all_beams_gives_the_same_answer(
    reference: Any, folder: Path, num_blocks: int
) -> None:
    """Beams are thrown out and computed again; those that have been heard make room."""
    beam, prompt = BeamParams(4), random_tokens(38, 5)
    wanted = [tokens for tokens, _ in expected(reference, prompt, 4, beam, 30)]
    small = LLM(folder, "float32", num_blocks=num_blocks, block_size=4, max_num_seqs=8)
    found = small.generate([prompt, prompt], params(4, beam, 30))
    for choices in found:
        assert [choice.token_ids for choice in choices] == wanted
    assert small.engine.scheduler.num_preemptions > 0
    assert small.engine.blocks.num_free == num_blocks
    small.engine.blocks.check_integrity([])


def test_four_beams_of_a_long_prompt_take_less_than_twice_the_blocks_of_one_sequence(
    tmp_path: Path,
) -> None:
    reference_model("llama", max_position_embeddings=640).save_pretrained(tmp_path)
    prompt = random_tokens(512, 5)

    def most_held(sampling: SamplingParams) -> int:
        llm = LLM(tmp_path, "float32", num_blocks=256, block_size=16, max_num_seqs=8)
        seq = llm._sequence(prompt, sampling)
        llm.engine.add(seq)
        most = 0
        while llm.engine.scheduler.has_work():
            llm.engine.step()
            most = max(most, 256 - llm.engine.blocks.num_free)
        return most

    one = most_held(SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    assert most_held(params(4, BeamParams(4, 1.0, "never"), 64)) < 2 * one


def test_beams_beside_ordinary_requests_change_neither(reference: Any, folder: Path) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    beam, prompt = BeamParams(3), random_tokens(13, 2)
    others = [random_tokens(n, n) for n in (4, 21)]
    alone = LLM(folder, "float32", num_blocks=128, block_size=4, max_num_seqs=8)
    wanted = [[c.token_ids for c in choices] for choices in alone.generate(others, greedy)]
    llm = LLM(folder, "float32", num_blocks=128, block_size=4, max_num_seqs=8)
    mixed = llm.generate([others[0], prompt, others[1]], [greedy, params(3, beam, 20), greedy])
    texts = [[c.token_ids for c in choices] for choices in mixed]
    assert [texts[0], texts[2]] == wanted
    assert texts[1] == [tokens for tokens, _ in expected(reference, prompt, 3, beam, 20)]


def test_a_finished_beam_is_kept_until_enough_better_ones_are_found() -> None:
    """Width 2 over three tokens, of which 0 ends; worked by hand, length penalty 0."""
    search = BeamSearch(BeamParams(2, 0.0, "never"), max_tokens=3, stop_ids={0})
    first = search.advance([[(1, -0.5), (0, -1.0), (2, -2.0), (3, -9.0)]])
    assert [(b.tokens[-1].token_id, b.score) for b in first] == [(1, -0.5), (2, -2.0)]
    assert [b.score for b in search.finished] == [-1.0]
    second = search.advance([[(0, -0.2), (1, -2.0), (2, -3.0)], [(1, -0.1), (0, -4.0)]])
    assert [(b.parent, b.tokens[-1].token_id) for b in second] == [(1, 1), (0, 1)]
    assert [b.score for b in search.finished] == [-0.7, -1.0]
    assert search.over, "the best running beam has -2.1 and can only fall"
