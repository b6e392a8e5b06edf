"""Log probabilities of real text, token by token, under one kind of cache and one policy.

Teacher-forced through the engine's own model runner and block arithmetic: a chunk is fed as one
token and its successors as a draft, so the runner gives the logits of every position. Under H2O
what follows the prompt goes one token at a time, as it decodes. Sequences are scored side by side.
"""

import pydoc_data.topics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from baton.engine import policy_blocks
from baton.engine.block_manager import BlockManager
from baton.engine.config import EngineConfig
from baton.engine.kv_cache import KVCache
from baton.engine.kv_layout import KVLayout, kv_dtype
from baton.engine.model_runner import ModelRunner
from baton.engine.models.decoder import DecoderModel
from baton.engine.sampling_params import SamplingParams
from baton.engine.sequence import ScheduledBatch, ScheduledSequence, Sequence
from baton.kv_policy import H2O, KVPolicy, parse_policy

CHUNK = 512


@dataclass(frozen=True)
class Kind:
    """A row of the table."""

    name: str
    kv_dtype: str = "auto"
    policy: str = "full"

    def layout(self, model: DecoderModel) -> KVLayout:
        return KVLayout.of(model.config, 16, kv_dtype(self.kv_dtype, "bfloat16"))

    @property
    def kv_policy(self) -> KVPolicy:
        return parse_policy(self.policy)


def real_text(tokenizer: Tokenizer) -> list[int]:
    """Token ids of Python's reference manual, which comes with every Python; about 100,000."""
    text = "\n\n".join(pydoc_data.topics.topics.values())
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


class Scorer:
    def __init__(self, model: DecoderModel, kind: Kind, num_blocks: int) -> None:
        layout = kind.layout(model)
        self.policy = kind.kv_policy
        self.config = EngineConfig(
            num_blocks,
            chunk_size=CHUNK,
            num_tail_blocks=layout.num_tail_blocks,
            states_per_block=layout.states_per_block,
        )
        self._blocks = BlockManager(num_blocks, 16, enable_prefix_cache=False)
        self._runner = ModelRunner(model, KVCache(layout, num_blocks))

    def start(self, tokens: list[int], prompt: int) -> Sequence:
        seq = Sequence(tokens[:prompt], SamplingParams(), kv_policy=self.policy)
        need = policy_blocks.need(self.config, seq, len(tokens))
        seq.tail_blocks = self._blocks.allocate(need.tail)
        seq.block_table = self._blocks.allocate(need.table)
        seq.compact_blocks = self._blocks.allocate(need.compact)
        return seq

    def logits(
        self, texts: list[list[int]], prompt: int, first: int
    ) -> Iterator[tuple[int, int, Tensor]]:
        """(text, position, logits of the tokens from there on) from position `first` on; `prompt`
        tokens of each are its prompt."""
        seqs = [self.start(text, prompt) for text in texts]
        for i, (seq, text) in enumerate(zip(seqs, texts, strict=True)):
            end = prompt if isinstance(self.policy, H2O) else len(text)
            while seq.num_computed_tokens < end:
                yield from self._feed([(i, seq, text)], end, first)
        while any(seq.num_computed_tokens < len(t) for seq, t in zip(seqs, texts, strict=True)):
            yield from self._feed(
                list(zip(range(len(seqs)), seqs, texts, strict=True)), None, first
            )
        for seq in seqs:
            self._blocks.release_sequence(seq)

    def _feed(
        self, rows: list[tuple[int, Sequence, list[int]]], end: int | None, first: int
    ) -> Iterator[tuple[int, int, Tensor]]:
        items = []
        for _, seq, text in rows:
            start = seq.num_computed_tokens
            until = start + 1 if end is None else min(end, start + CHUNK)
            if start < first < until:
                until = first
            if not self.policy.is_full:
                until = policy_blocks.step_end(self.config, self._blocks, seq, until)
            if start >= first:
                seq.token_ids = text[: start + 1]
                items.append(ScheduledSequence(seq, 1, text[start + 1 : until]))
            else:
                seq.token_ids = text[: until + 1]  # nothing is sampled
                items.append(ScheduledSequence(seq, until - start))
        logits = self._runner.run(ScheduledBatch(items)).split(
            [item.num_new_tokens for item in items if item.samples] or [0]
        )
        found = iter(logits)
        for item, (i, seq, text) in zip(items, rows, strict=True):
            start = seq.num_computed_tokens
            if item.samples:
                yield i, start, next(found)
            seq.num_computed_tokens = start + item.num_new_tokens
            seq.token_ids = text[: seq.num_computed_tokens]
            policy_blocks.drop(self._blocks, seq)


@dataclass
class Score:
    """Of every scored position, in the order of texts: log probability of the true next token, and
    the most likely one."""

    logprobs: Tensor
    best: Tensor

    @property
    def perplexity(self) -> float:
        return float(torch.exp(-self.logprobs.double().mean()))


def score(scorer: Scorer, texts: list[list[int]], prompt: int, first: int) -> Score:
    shape = (len(texts), len(texts[0]) - 1 - first)
    logprobs, best = torch.zeros(shape), torch.zeros(shape, dtype=torch.long)
    for i, start, logits in scorer.logits(texts, prompt, first):
        count = min(len(logits), len(texts[i]) - 1 - start)
        target = torch.tensor(texts[i][start + 1 : start + 1 + count]).unsqueeze(1)
        place = slice(start - first, start - first + count)
        logprobs[i, place] = logits[:count].log_softmax(-1).gather(1, target)[:, 0]
        best[i, place] = logits[:count].argmax(-1)
    return Score(logprobs, best)
