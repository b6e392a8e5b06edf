"""bf16 with our own kernels: equal, as in fp32. Torch's kernels round differently for each batch
shape: equal up to the first near-tie, valid after it.

Re-scoring is one prefill over prompt and answer by the same bf16 model.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio
import torch

from baton.engine.kv_cache import KVCache
from baton.engine.kv_layout import KVLayout
from baton.engine.ops.attention import (
    AttentionBatch,
    Batch,
    PagedBatch,
    PrefillChunk,
    reads_in_place,
)
from baton.engine.sampling_params import SamplingParams
from baton.store import StoredModel
from tests.golden.oracle import Oracle
from tests.golden.prompts import BLOCK, GoldenPrompt
from tests.support.cluster import Cluster, running_cluster, shared_weights

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

NEAR_TIE_NATS = 0.15
MAX_TOKENS = 24
LONGEST = 1024
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)


class Scorer:
    """Teacher-forced log probabilities of a continuation: one prefill over all of it."""

    def __init__(self, model: StoredModel) -> None:
        self._model, config = shared_weights(model.path, "bfloat16")
        self._masks = dict.fromkeys(config.windows)
        self._cache = KVCache(KVLayout.of(config, BLOCK, "bfloat16"), LONGEST // BLOCK)

    @torch.inference_mode()
    def logprobs(self, prompt: list[int], continuation: list[int]) -> torch.Tensor:
        """[continuation, vocab]: row i is the distribution that token i is drawn from."""
        ids = torch.tensor(prompt + continuation)
        count = len(ids)
        positions = torch.arange(count)
        hidden = self._model.forward(ids, positions, self._cache, self._batch(positions))
        rows = hidden[len(prompt) - 1 : count - 1].contiguous()
        return self._model.logits(rows).log_softmax(dim=-1)

    def _batch(self, positions: torch.Tensor) -> Batch:
        count = len(positions)
        if not self._model.reads_in_place:
            chunk = PrefillChunk(0, count, count, None, self._masks)
            return AttentionBatch(positions, None, (chunk,))
        table = torch.arange(LONGEST // BLOCK, dtype=torch.int32).unsqueeze(0)
        starts = torch.tensor([0, count], dtype=torch.int32)
        return PagedBatch(positions, table, starts, starts[1:], BLOCK)

    def gaps(self, prompt: list[int], continuation: list[int]) -> list[float]:
        """How much less likely than the most likely token each one is, in nats."""
        if not continuation:
            return []
        found = self.logprobs(prompt, continuation)
        chosen = found[range(len(continuation)), continuation]
        return (found.amax(dim=-1) - chosen).tolist()


@dataclass(frozen=True)
class Departure:
    """Where a served answer leaves the offline one. `gap`: nats between the two candidates;
    `worst_after`: the least valid token from there on."""

    name: str
    position: int
    gap: float
    worst_after: float


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), None)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    async with running_cluster(dtype="bfloat16") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def oracle16(smollm2: StoredModel) -> Oracle:
    return Oracle(smollm2, "bfloat16")


async def served_tokens(cluster: Cluster, oracle: Oracle, prompt: GoldenPrompt) -> list[int]:
    """The ids of the answer: each token shows bytes of its own."""
    answer = await cluster.ask(
        prompt.path, **prompt.body, temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True
    )
    assert answer.counts[1] == MAX_TOKENS
    return oracle.ids_of_shown(answer.choices[0].tokens)


SOME = pytest.param(4, id="every fourth prompt")
ALL = pytest.param(1, id="every prompt", marks=[pytest.mark.slow, pytest.mark.timeout(300)])


@pytest.mark.parametrize("step", [SOME, ALL])
async def test_bf16_departs_from_the_offline_tokens_only_at_near_ties(
    cluster: Cluster,
    oracle16: Oracle,
    smollm2: StoredModel,
    prompts: list[GoldenPrompt],
    step: int,
) -> None:
    """In batches of eight, and a sample of them alone."""
    prompts = prompts[::step]
    await asyncio.to_thread(oracle16.choices, [oracle16.ids(p) for p in prompts], GREEDY)
    await cluster.wait_for_workers()
    departures = await depart(cluster, oracle16, smollm2, prompts, 8)
    departures += await depart(cluster, oracle16, smollm2, prompts[::5], 1)
    await cluster.settle()
    if reads_in_place(torch.bfloat16, shared_weights(smollm2.path, "bfloat16")[1].head_dim, None):
        assert not departures
    assert not [d for d in departures if max(d.gap, d.worst_after) > NEAR_TIE_NATS]
    assert len({d.name for d in departures}) < len(prompts) / 2, "most answers are equal"


async def depart(
    cluster: Cluster, oracle: Oracle, model: StoredModel, prompts: list[GoldenPrompt], batch: int
) -> list[Departure]:
    scorer = Scorer(model)
    found = []
    for start in range(0, len(prompts), batch):
        group = prompts[start : start + batch]
        served = await asyncio.gather(*(served_tokens(cluster, oracle, p) for p in group))
        for prompt, tokens in zip(group, served, strict=True):
            ids = oracle.ids(prompt)
            ((offline,),) = oracle.choices([ids], GREEDY)
            wanted = offline.token_ids
            if (at := first_difference(tokens, wanted)) is not None:
                row = scorer.logprobs(ids + wanted[:at], [wanted[at]])[0]
                gap = abs(float(row[wanted[at]] - row[tokens[at]]))
                after = scorer.gaps(ids + tokens[: at + 1], tokens[at + 1 :])
                found.append(Departure(prompt.name, at, gap, max(after, default=0.0)))
    return found


async def test_the_scorer_sees_a_token_that_nobody_would_choose(
    oracle16: Oracle, smollm2: StoredModel, prompts: list[GoldenPrompt]
) -> None:
    ids = oracle16.ids(prompts[0])
    ((choice,),) = oracle16.choices([ids], GREEDY)
    scorer = Scorer(smollm2)
    assert max(scorer.gaps(ids, choice.token_ids)) < NEAR_TIE_NATS
    wrong = [*choice.token_ids[:5], choice.token_ids[5] + 1, *choice.token_ids[6:]]
    assert max(scorer.gaps(ids, wrong)) > 1.0
