"""What the served answers must be: the offline engine's tokens, as an HTTP client sees them.

Tokenising, chat template and decoding are those of `transformers`, so that the router's own
are checked against something else.
"""

import asyncio
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from transformers import AutoTokenizer

from baton.engine.llm import LLM, Choice
from baton.engine.sampling_params import SamplingParams
from baton.engine.sequence import FinishReason
from baton.store import StoredModel
from router.text.tokenizer import Tokenizer
from tests.golden.prompts import BLOCK, CHUNK, GoldenPrompt
from tests.support.answers import Answer
from tests.support.cluster import shared_weights

LOGPROB_TOLERANCE = 1e-3


@dataclass(frozen=True)
class ExpectedChoice:
    text: str
    tokens: list[bytes]
    finish_reason: str
    logprobs: list[float]
    num_tokens: int


class Oracle:
    """Answers are kept: the same question is computed once per session."""

    def __init__(self, model: StoredModel, dtype: str = "float32") -> None:
        torch.set_num_threads(1)  # as the workers: two busy pools on two cores only spin
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model.path)
        with mock.patch("baton.engine.llm.load_model", shared_weights):
            self.llm = LLM(
                model.path,
                dtype,
                num_blocks=512,
                block_size=BLOCK,
                max_num_seqs=16,
                chunk_size=CHUNK,
                enable_prefix_cache=False,
            )
        self._shown = Tokenizer.load(model.path).shown_bytes
        self._id_of = {self._shown(i): i for i in range(len(self.tokenizer))}
        assert len(self._id_of) == len(self.tokenizer)
        self._known: dict[str, list[Choice]] = {}

    def ids(self, prompt: GoldenPrompt) -> list[int]:
        content: Any = prompt.content
        if prompt.is_chat:
            text = self.tokenizer.apply_chat_template(
                content, tokenize=False, add_generation_prompt=True
            )
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        if isinstance(content, str):
            return list(self.tokenizer.encode(content))
        return list(content)

    def ids_of_shown(self, tokens: list[bytes]) -> list[int]:
        """No two tokens of this vocabulary show the same bytes."""
        return [self._id_of[token] for token in tokens]

    def choices(self, prompts: list[list[int]], sampling: SamplingParams) -> list[list[Choice]]:
        """What the engine generates, all prompts together."""
        sampling = replace(sampling, logprobs=0 if sampling.logprobs is None else sampling.logprobs)
        keys = [repr((prompt, sampling)) for prompt in prompts]
        new = {k: p for k, p in zip(keys, prompts, strict=True) if k not in self._known}
        found = self.llm.generate(list(new.values()), sampling)
        self._known.update(zip(new, found, strict=True))
        return [self._known[key] for key in keys]

    async def expected(
        self, prompts: list[list[int]], sampling: SamplingParams
    ) -> list[list[ExpectedChoice]]:
        """Beside the event loop, where the cluster's heartbeats go on."""
        found = await asyncio.to_thread(self.choices, prompts, sampling)
        return [[self.as_seen(choice) for choice in choices] for choices in found]

    def as_seen(self, choice: Choice) -> ExpectedChoice:
        """The token that stops a choice is counted, not shown."""
        stopped = choice.finish_reason is FinishReason.STOP
        shown = choice.tokens[:-1] if stopped else choice.tokens
        ids = [token.token_id for token in shown]
        assert choice.finish_reason is not None
        return ExpectedChoice(
            text=self.tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            ),
            tokens=[self._shown(token_id) for token_id in ids],
            finish_reason=choice.finish_reason.value,
            logprobs=[token.logprob for token in shown if token.logprob is not None],
            num_tokens=len(choice.tokens),
        )


def assert_equal(
    answer: Answer,
    expected: list[ExpectedChoice],
    name: str = "",
    tolerance: float = LOGPROB_TOLERANCE,
) -> None:
    """Texts, tokens, reasons and counts are equal; log probabilities within rounding."""
    assert answer.texts == [choice.text for choice in expected], name
    assert answer.tokens == [choice.tokens for choice in expected], name
    assert answer.reasons == [choice.finish_reason for choice in expected], name
    assert answer.counts[1] == sum(choice.num_tokens for choice in expected), name
    for got, wanted in zip(answer.choices, expected, strict=True):
        pairs = zip(got.logprobs, wanted.logprobs, strict=True)
        assert all(abs(a - b) < tolerance for a, b in pairs), name
