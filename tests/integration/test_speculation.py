"""Speculation on a decode worker: the same answers in fewer steps, whatever is asked for."""

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baton.cluster.errors import SettingsError
from baton.cluster.settings import DecodeSettings
from baton.engine.llm import LLM
from baton.engine.sampling_params import SamplingParams
from baton.store import StoredModel
from baton.v1 import common_pb2
from tests.support.client import PairClient, sampling_pb
from tests.support.cluster import COMPLETIONS, running_cluster
from tests.support.drafts import Foresight, foreseeing, looking_up
from tests.support.families import reference_model
from tests.support.tiny import VOCAB, RunningWorker, run_decode, run_prefill

MAX_TOKENS = 60
QUICK = ("llama int4", "mistral", "deepseek_v2")
MORE = ("llama", "llama int8", "gemma2", "gpt2", "mistral int8")
CASES = [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)]
"""A family, and how its cache is kept if not as it computes."""


@dataclass
class Served:
    llm: LLM
    decode: RunningWorker
    client: PairClient


@pytest.fixture(params=CASES)
async def served(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Served]:
    family, _, kind = request.param.partition(" ")
    changes = {"sliding_window": 9} if family == "mistral" else {}
    model = reference_model(family, spread=0.4, vocab_size=VOCAB, **changes)
    model.save_pretrained(tmp_path)
    values: dict[str, Any] = {"block_size": 8, "chunk_size": 16, "max_num_seqs": 8}
    values |= {"kv_dtype": kind or "auto", "num_blocks": 128}
    llm = LLM(tmp_path, "float32", **values, enable_prefix_cache=False)
    async with (
        run_prefill(tmp_path, **values) as prefill,
        run_decode(tmp_path, **values) as decode,
        PairClient(prefill, decode) as client,
    ):
        yield Served(llm, decode, client)


async def test_wrong_and_right_drafts_change_no_token_of_any_choice(served: Served) -> None:
    """Three choices in a pool that is too small for them, unless they give blocks back, then one
    of them again from its middle, as after the loss of its worker."""
    prompt = random.Random(7).choices(range(3, VOCAB), k=22)
    values = {"temperature": 0.8, "seed": 5, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    (choices,) = served.llm.generate([prompt], SamplingParams(n=3, **values))  # type: ignore[arg-type]
    wanted = [choice.token_ids for choice in choices]
    foresight = Foresight(wrong=0.2)
    foresight.texts = [prompt + text for text in wanted]
    engine = served.decode.parts.engine
    drafting = engine.scheduler.drafting = foreseeing(foresight)
    room = 20 + 3 * engine.blocks.num_tail_blocks
    taken = engine.apply(lambda: engine.blocks.allocate(engine.blocks.num_blocks - room))
    answer = await served.client.serve(prompt, sampling_pb(n=3, **values))
    assert answer.texts() == wanted
    assert (engine.scheduler.num_preemptions > 0) == (engine.blocks.window is None)
    assert 0 < drafting.tokens_accepted < drafting.tokens_drafted
    assert answer.decode_done is not None
    assert answer.decode_done.decode_steps.steps < MAX_TOKENS - 1
    engine.apply(lambda: engine.blocks.release(taken))
    begun = common_pb2.Continuation(choice=1, output_token_ids=wanted[1][:20])
    rest = await served.client.serve(prompt, sampling_pb(**values), continuation=begun)
    assert rest.tokens[1] == wanted[1]
    await served.decode.wait_idle()


async def test_the_gateway_gives_the_same_answers_with_drafts(tiny_chat: StoredModel) -> None:
    """Answers of two letters, so that much of them can be looked up."""
    bodies: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 2, "n": 2},
        {"temperature": 0.5, "seed": 3, "frequency_penalty": 0.3, "min_tokens": 20},
        {"temperature": 0.9, "seed": 1, "stop": ["aabb", "babab"], "min_tokens": 9},
    ]
    letters = {"prompt": "abba", "max_tokens": 96, "logit_bias": {97: 100, 98: 100}}
    bodies = [{**letters, **body} for body in bodies]
    async with running_cluster(
        tiny_chat, router={"decode_prefills": "never"}, decode={"speculate": "ngram(match=2)"}
    ) as cluster:
        (worker,) = cluster.decodes
        assert worker.scheduler.drafting is not None
        worker.scheduler.drafting = None
        plain = [await cluster.ask(COMPLETIONS, **body) for body in bodies]
        worker.scheduler.drafting = looking_up()
        for stream in (False, True):
            for body, wanted in zip(bodies, plain, strict=True):
                answer = await cluster.ask(COMPLETIONS, stream=stream, **body)
                assert (answer.texts, answer.reasons) == (wanted.texts, wanted.reasons)
                assert answer.tokens == wanted.tokens
                assert answer.usage["completion_tokens"] == wanted.usage["completion_tokens"]
        counters = await cluster.totals(cluster.decodes)
        assert counters.tokens_drafted > counters.tokens_accepted > 100
        rows = (await cluster.client.get("/v1/requests?limit=100")).json()["data"]
        found = [await cluster.client.get(f"/v1/requests/{row['id']}") for row in rows]
        assert any('"drafted"' in each.text for each in found)
        await cluster.settle()


@pytest.mark.parametrize("text", ["medusa", "ngram(match=0)", "draft()"])
def test_a_wrong_speculate_is_a_sentence_that_names_the_field(text: str) -> None:
    with pytest.raises(SettingsError, match="--speculate must be off, ngram"):
        DecodeSettings.build(speculate=text)
