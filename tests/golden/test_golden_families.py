"""Every family in fp32: a prefill worker and a decode worker give the offline engine's tokens."""

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.engine.llm import LLM
from baton.engine.sampling_params import SamplingParams
from tests.support.client import PairClient, sampling_pb
from tests.support.families import reference_model
from tests.support.tiny import VOCAB, RunningWorker, run_decode, run_prefill

BLOCK, CHUNK, MAX_TOKENS, WINDOW = 4, 16, 20, 9
FAMILIES = (
    "mistral",
    "gpt2",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "mixtral",
    "deepseek_v2",
)


@dataclass
class Served:
    llm: LLM
    prefill: RunningWorker
    decode: RunningWorker
    client: PairClient


@pytest.fixture(params=FAMILIES)
async def served(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Served]:
    # Weights large enough to give varied text.
    changes = {"sliding_window": WINDOW} if request.param == "mistral" else {}
    model = reference_model(request.param, spread=0.4, vocab_size=VOCAB, **changes)
    model.save_pretrained(tmp_path)
    values = {"block_size": BLOCK, "chunk_size": CHUNK, "max_num_seqs": 8}
    llm = LLM(tmp_path, "float32", num_blocks=64, **values, enable_prefix_cache=False)
    async with (
        run_prefill(tmp_path, **values) as prefill,
        run_decode(tmp_path, **values) as decode,
        PairClient(prefill, decode) as client,
    ):
        yield Served(llm, prefill, decode, client)


async def test_a_split_request_gives_the_offline_tokens_cold_and_warm(served: Served) -> None:
    lengths = (1, 4, 15, 33, 70)
    prompts = [random.Random(n).choices(range(3, VOCAB), k=n) for n in lengths]
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    expected = [[c.token_ids for c in choices] for choices in served.llm.generate(prompts, greedy)]
    assert len({token for (tokens,) in expected for token in tokens}) > 20, "monotonous model"
    for warm in (False, True):
        for prompt, wanted in zip(prompts, expected, strict=True):
            answer = await served.client.serve(
                prompt, sampling_pb(max_tokens=MAX_TOKENS, ignore_eos=True)
            )
            assert answer.texts() == wanted
            assert answer.prefill_done is not None
            cached = (len(prompt) - 1) // BLOCK * BLOCK if warm else 0
            assert answer.prefill_done.num_computed_tokens == len(prompt) - cached
    transfers = served.prefill.status.activity.transfers
    assert transfers.handoffs == served.decode.status.activity.transfers.handoffs == 10
    window = served.prefill.parts.engine.blocks.window
    outside = [max(0, n + 1 - window) // BLOCK if window else 0 for n in lengths]
    cold = sum(-(-n // BLOCK) - o for n, o in zip(lengths, outside, strict=True))
    sent = cold + sum(-(-n // BLOCK) - (n - 1) // BLOCK for n in lengths)
    assert transfers.blocks == sent
    assert transfers.bytes == sent * served.prefill.parts.cache.layout.bytes_per_block
    assert served.decode.parts.engine.scheduler.prefill_tokens_computed == 0, "silent re-prefill"
    await served.prefill.wait_idle()
    await served.decode.wait_idle()


@pytest.mark.slow
async def test_choices_of_one_prompt_and_preempted_ones_give_the_offline_tokens(
    served: Served,
) -> None:
    """The decode pool is too small for three choices, unless they give blocks back: some are
    computed again."""
    prompt = random.Random(7).choices(range(3, VOCAB), k=22)
    sampling = SamplingParams(temperature=0.8, seed=5, n=3, max_tokens=60, ignore_eos=True)
    ((first, second, third),) = served.llm.generate([prompt], sampling)
    engine = served.decode.parts.engine
    taken = engine.apply(lambda: engine.blocks.allocate(24))
    answer = await served.client.serve(
        prompt, sampling_pb(temperature=0.8, seed=5, n=3, max_tokens=60, ignore_eos=True)
    )
    assert answer.texts() == [first.token_ids, second.token_ids, third.token_ids]
    assert (engine.scheduler.num_preemptions > 0) == (engine.blocks.window is None)
    engine.apply(lambda: engine.blocks.release(taken))
    await served.decode.wait_idle()
