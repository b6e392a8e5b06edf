"""The cluster of docker-compose.yml, built and started once, and what the offline engine says."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from baton.engine.ops.attention import reads_in_place
from baton.engine.sampling_params import SamplingParams
from baton.store import resolve
from tests.golden.oracle import Oracle
from tests.golden.prompts import GoldenPrompt, golden_prompts
from tests.support.answers import Answer
from tests.support.compose import BUILD_TIMEOUT_S, Compose

KV_MEMORY = "64MiB"


@pytest.fixture(scope="session")
def dtype() -> str:
    """What is exact on this machine: bf16 is with our own kernels, and fp32 always."""
    return "bfloat16" if reads_in_place(torch.bfloat16, 64, None) else "float32"


@pytest.fixture(scope="session")
def compose(dtype: str) -> Iterator[Compose]:
    # Every prompt is handed off as long as a prefill worker lives.
    compose = Compose(DTYPE=dtype, KV_MEMORY=KV_MEMORY, DECODE_PREFILLS="fallback")
    compose("down", "--volumes", "--remove-orphans")
    try:
        compose("build", timeout_s=BUILD_TIMEOUT_S)
        compose.up()
        yield compose
    finally:
        compose("down", "--volumes", "--timeout", "45")


@dataclass(frozen=True)
class Golden:
    """`cases`: prompts, and the token ids that answer them greedily."""

    oracle: Oracle
    cases: list[tuple[GoldenPrompt, list[int]]]

    def check(self, answer: Answer, wanted: list[int]) -> None:
        assert answer.counts[1] == len(wanted)
        assert self.oracle.ids_of_shown(answer.choices[0].tokens) == wanted


@pytest.fixture(scope="session")
def golden(dtype: str) -> Golden:
    oracle = Oracle(resolve("smollm2", progress=False), dtype)
    prompts = golden_prompts(oracle.tokenizer.encode)[::6]
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    wanted = oracle.choices([oracle.ids(prompt) for prompt in prompts], sampling)
    found = zip(prompts, wanted, strict=True)
    return Golden(oracle, [(prompt, choices[0].token_ids) for prompt, choices in found])
