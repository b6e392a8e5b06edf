"""Every family and kind of cache in fp32: two workers give the offline engine's tokens."""

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baton.engine.llm import LLM
from baton.engine.sampling_params import SamplingParams
from tests.support.client import PairClient, sampling_pb
from tests.support.families import reference_model
from tests.support.tiny import VOCAB, RunningWorker, run_decode, run_prefill

BLOCK, CHUNK, MAX_TOKENS, WINDOW = 4, 16, 20, 9
QUICK = ("mistral", "gemma2", "deepseek_v2", "llama int4")
MORE = (
    "gpt2",
    "gemma",
    "gemma3_text",
    "phi3",
    "mixtral",
    "llama fp8",
    "llama int8",
    "mistral int8",
    "gemma2 int4",
)
"""A family, and how its cache is kept if not as it computes."""
CASES = [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)]


@dataclass
class Served:
    llm: LLM
    prefill: RunningWorker
    decode: RunningWorker
    client: PairClient


@pytest.fixture(params=CASES)
async def served(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Served]:
    family, _, kind = request.param.partition(" ")
    # Weights large enough to give varied text.
    changes = {"sliding_window": WINDOW} if family == "mistral" else {}
    model = reference_model(family, spread=0.4, vocab_size=VOCAB, **changes)
    model.save_pretrained(tmp_path)
    values: dict[str, Any] = {"block_size": BLOCK, "chunk_size": CHUNK, "max_num_seqs": 8}
    values["kv_dtype"] = kind or "auto"
    llm = LLM(tmp_path, "float32", num_blocks=128, **values, enable_prefix_cache=False)
    async with (
        run_prefill(tmp_path, num_blocks=128, **values) as prefill,
        run_decode(tmp_path, num_blocks=128, **values) as decode,
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
    layout = served.prefill.parts.cache.layout
    # A last block that is not full is shipped as it is, or as the blocks of the tail.
    rest = [(layout.num_tail_blocks or 1) * (n % BLOCK > 0) for n in lengths]
    cold = sum(n // BLOCK - o + r for n, o, r in zip(lengths, outside, rest, strict=True))
    warm_sent = sum(n // BLOCK - (n - 1) // BLOCK + r for n, r in zip(lengths, rest, strict=True))
    assert transfers.blocks == cold + warm_sent
    assert transfers.bytes == transfers.blocks * layout.bytes_per_block
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
    room = 40 + 3 * engine.blocks.num_tail_blocks
    taken = engine.apply(lambda: engine.blocks.allocate(engine.blocks.num_blocks - room))
    answer = await served.client.serve(
        prompt, sampling_pb(temperature=0.8, seed=5, n=3, max_tokens=60, ignore_eos=True)
    )
    assert answer.texts() == [first.token_ids, second.token_ids, third.token_ids]
    assert (engine.scheduler.num_preemptions > 0) == (engine.blocks.window is None)
    engine.apply(lambda: engine.blocks.release(taken))
    await served.decode.wait_idle()
