"""Under a KV policy, tokens in fp32 are the offline engine's, whichever way a request is served."""

import asyncio
from typing import Any
from unittest import mock

import pytest

from baton.engine.llm import LLM
from baton.engine.sampling_params import SamplingParams
from baton.store import StoredModel
from tests.golden.oracle import LOGPROB_TOLERANCE, Oracle, assert_equal
from tests.golden.prompts import BLOCK, CHUNK, GoldenPrompt
from tests.support.cluster import running_cluster, shared_weights

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

MAX_TOKENS = 12
POLICIES = {
    "streaming": ("streaming(sinks=4,window=24)", "auto"),
    "streaming int8": ("streaming(sinks=4,window=24)", "int8"),
    "snapkv": ("snapkv(budget=24,window=8)", "auto"),
    "snapkv int8": ("snapkv(budget=24,window=8)", "int8"),
    "h2o": ("h2o(budget=20)", "auto"),
}
WAYS: dict[str, dict[str, Any]] = {
    "1P1D": {},
    "2P2D": {"prefills": 2, "decodes": 2},
    "torch": {"transport": "torch"},
    "grpc": {"transport": "grpc"},
    "preempted": {"decode": {"num_blocks": 44}},
    "decode alone": {"prefills": 0, "router": {"decode_prefills": "auto"}},
}
PATIENT: dict[str, dict[str, Any]] = {
    "router": {"queue_timeout_s": 500.0, "prefill_timeout_s": 500.0, "peer_timeout_s": 60.0},
    "prefill": {"handoff_timeout_s": 60.0, "peer_timeout_s": 60.0},
    "decode": {"lease_s": 500.0, "peer_timeout_s": 60.0},
}
"""All prompts come at once, and quantized ones are computed slowly in fp32."""


def offline(model: StoredModel, policy: str, kv_dtype: str) -> LLM:
    with mock.patch("baton.engine.llm.load_model", shared_weights):
        return LLM(
            model.path,
            "float32",
            block_size=BLOCK,
            max_num_seqs=16,
            chunk_size=CHUNK,
            enable_prefix_cache=False,
            kv_dtype=kv_dtype,
            kv_policy=policy,
        )


@pytest.mark.parametrize("name", POLICIES)
async def test_every_way_of_serving_gives_the_offline_tokens(
    smollm2: StoredModel, oracle: Oracle, prompts: list[GoldenPrompt], name: str
) -> None:
    policy, kv_dtype = POLICIES[name]
    some = [prompt for prompt in prompts[::8] if len(oracle.ids(prompt)) < 400]
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=0)
    llm = offline(smollm2, policy, kv_dtype)
    ids = [oracle.ids(prompt) for prompt in some]
    found = await asyncio.to_thread(llm.generate, ids, sampling)
    # Batches of other shapes round the other way now and then: a step of an int8 value.
    tolerance = LOGPROB_TOLERANCE if kv_dtype == "auto" else 0.05
    for way, values in WAYS.items():
        roles = {role: patience | values.get(role, {}) for role, patience in PATIENT.items()}
        settings = {**values, **roles, "kv_policy": policy, "kv_dtype": kv_dtype}
        async with running_cluster(**settings) as cluster:
            answers = await asyncio.gather(
                *(cluster.ask(p.path, **p.body, temperature=0, max_tokens=MAX_TOKENS) for p in some)
            )
            for prompt, answer, choices in zip(some, answers, found, strict=True):
                wanted = [oracle.as_seen(choice) for choice in choices]
                assert_equal(answer, wanted, f"{name}, {way}, {prompt.name}", tolerance)
            await cluster.settle()
