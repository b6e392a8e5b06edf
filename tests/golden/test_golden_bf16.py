"""bf16 rounds differently for each batch shape: equal up to the first near-tie, valid after it."""

import pytest
import torch

from baton.engine.kv_cache import KVCache
from baton.engine.kv_layout import KVLayout
from baton.engine.ops.attention import AttentionBatch, PrefillChunk
from baton.engine.sampling_params import SamplingParams
from baton.store import StoredModel
from tests.golden.prompts import BLOCK
from tests.support.cluster import shared_weights

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
        chunk = PrefillChunk(0, count, count, None, self._masks)
        batch = AttentionBatch(positions, None, (chunk,))
        hidden = self._model.forward(ids, positions, self._cache, batch)
        rows = hidden[len(prompt) - 1 : count - 1].contiguous()
        return self._model.logits(rows).log_softmax(dim=-1)

    def assert_valid(self, prompt: list[int], tokens: list[int], name: str) -> None:
        """Every token is the most likely one, or nearly so."""
        found = self.logprobs(prompt, tokens)
        gaps = found.amax(dim=-1) - found[range(len(tokens)), tokens]
        worst = int(gaps.argmax())
        assert gaps[worst] < NEAR_TIE_NATS, f"{name}: token {worst} is {gaps[worst]:.3f} nats off"


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


@pytest.mark.parametrize("batch", [1, 8])
async def test_bf16_tokens_are_the_offline_ones_up_to_a_near_tie_and_valid_after_it(
    cluster: Cluster,
    oracle16: Oracle,
    smollm2: StoredModel,
    prompts: list[GoldenPrompt],
    batch: int,
) -> None:
    scorer = Scorer(smollm2)
    some = prompts[:: 2 if batch == 8 else 8]
    ids = [oracle16.ids(prompt) for prompt in some]
    offline = [choice.token_ids for (choice,) in oracle16.choices(ids, GREEDY)]
    for start in range(0, len(some), batch):
        group = slice(start, start + batch)
        served = await asyncio.gather(
            *(served_tokens(cluster, oracle16, prompt) for prompt in some[group])
        )
        for prompt, mine, wanted, tokens in zip(
            some[group], ids[group], offline[group], served, strict=True
        ):
            scorer.assert_valid(mine, tokens, prompt.name)
            at = first_difference(tokens, wanted)
            if at is not None:
                (row,) = scorer.logprobs(mine + wanted[:at], [wanted[at]])
                gap = abs(float(row[wanted[at]] - row[tokens[at]]))
                assert gap < NEAR_TIE_NATS, f"{prompt.name}: {gap:.3f} nats apart at token {at}"
    await cluster.settle()


async def test_the_scorer_refuses_a_continuation_that_nobody_would_choose(
    oracle16: Oracle, smollm2: StoredModel, prompts: list[GoldenPrompt]
) -> None:
    ids = oracle16.ids(prompts[0])
    ((choice,),) = oracle16.choices([ids], GREEDY)
    scorer = Scorer(smollm2)
    scorer.assert_valid(ids, choice.token_ids, "good")
    wrong = [*choice.token_ids[:5], choice.token_ids[5] + 1, *choice.token_ids[6:]]
    with pytest.raises(AssertionError, match="nats off"):
        scorer.assert_valid(ids, wrong, "bad")
