"""The best tokens are told apart although bfloat16 products cannot."""

import pytest
import torch

from baton.engine.llm import LLM
from baton.engine.ops.logits import sharpen_
from baton.engine.sampling_params import SamplingParams
from baton.store import resolve
from router.text import Tokenizer


def test_tokens_that_tie_in_bfloat16_are_ordered_as_in_float32() -> None:
    """Two logits near 20 that differ by 0.05 round to the same bfloat16."""
    hidden = torch.ones(2, 16)
    weight = torch.full((40, 16), 0.25).bfloat16()
    weight[7], weight[3] = 1.25, 1.25
    weight[7, 0] = 1.3046875
    exact = hidden @ weight.float().T
    rounded = exact.bfloat16().float()
    assert rounded[0, 3] == rounded[0, 7] and rounded[0].argmax() == 3
    sharpen_(rounded, hidden, weight)
    assert rounded.argmax(-1).tolist() == [7, 7]
    assert torch.equal(rounded[:, [3, 7]], exact[:, [3, 7]])


def test_logits_far_from_the_best_stay_as_they_were() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 32, generator=generator)
    weight = torch.randn(500, 32, generator=generator).bfloat16()
    before = (hidden @ weight.float().T).bfloat16().float()
    after = before.clone()
    sharpen_(after, hidden, weight)
    assert 3 <= int((after != before).sum()) + 3 < 30
    assert torch.allclose(after, before, atol=0.3)


def test_a_flat_distribution_is_left_alone_instead_of_recomputed_whole() -> None:
    """All of the vocabulary times the hidden size in float32 would be gigabytes for a batch."""
    logits = torch.zeros(2, 1000)
    sharpen_(logits, torch.full((2, 8), 3.0), torch.ones(1000, 8).bfloat16())
    assert not logits.any()


@pytest.mark.model
@pytest.mark.parametrize("chunk_size", [16, 32, 512])
def test_a_bf16_answer_does_not_hang_on_how_its_prompt_was_chunked(chunk_size: int) -> None:
    """ "The" and "L" lie 0.10 nats apart here; in bf16 they tied, and France lost its capital."""
    model = resolve("smollm2", progress=False)
    tokenizer = Tokenizer.load(model.path)
    turn = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    ids = tokenizer.encode(f"<|im_start|>system\n{system}<|im_end|>\n{turn}", False)
    llm = LLM(model.path, chunk_size=chunk_size, max_num_seqs=8, enable_prefix_cache=False)
    ((choice,),) = llm.generate([ids], SamplingParams(temperature=0, max_tokens=8))
    assert "Paris" in tokenizer.decode(choice.token_ids)
