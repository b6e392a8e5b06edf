"""An offline engine under a KV policy, its books in reach."""

from pathlib import Path
from typing import Any

from baton.engine.llm import LLM
from baton.engine.sampling_params import SamplingParams


def policy_llm(path: Path, policy: str, **values: Any) -> LLM:
    own = {"num_blocks": 64, "block_size": 4, "chunk_size": 16, "max_num_seqs": 8}
    return LLM(path, "float32", **{**own, **values, "kv_policy": policy})


def sampling(max_tokens: int, **values: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=0, **values
    )


def generated(
    llm: LLM, prompts: list[list[int]], max_tokens: int
) -> list[tuple[list[int], list[float]]]:
    """Tokens and log probabilities per prompt; afterwards every block is free again."""
    found = [choices[0] for choices in llm.generate(prompts, sampling(max_tokens))]
    blocks = llm.engine.blocks
    blocks.check_integrity([])
    assert blocks.num_free == blocks.num_blocks
    return [(c.token_ids, [t.logprob or 0.0 for t in c.tokens]) for c in found]


def assert_alike(
    found: tuple[list[int], list[float]],
    wanted: tuple[list[int], list[float]],
    tolerance: float = 1e-3,
) -> None:
    assert found[0] == wanted[0]
    assert max(abs(a - b) for a, b in zip(found[1], wanted[1], strict=True)) < tolerance
