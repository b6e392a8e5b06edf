"""The real model on Ray against the offline engine."""

import asyncio

import pytest

from baton.engine.sampling_params import SamplingParams
from baton.store import resolve
from tests.golden.oracle import Oracle
from tests.golden.prompts import golden_prompts
from tests.support.ray_nodes import RayNodes, baton_on_ray

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(600)]


async def test_golden_prompts_give_the_tokens_of_the_offline_engine(nodes: RayNodes) -> None:
    oracle = Oracle(resolve("smollm2", progress=False))
    prompts = golden_prompts(oracle.tokenizer.encode)[::6]
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    wanted = await asyncio.to_thread(oracle.choices, [oracle.ids(p) for p in prompts], sampling)
    async with baton_on_ray(model="smollm2", num_blocks=512) as baton:
        for prompt, choices in zip(prompts, wanted, strict=True):
            body = {**prompt.body, "temperature": 0, "ignore_eos": True, "max_tokens": 16}
            answer = await baton.ask(prompt.path, **body)
            assert answer.counts[1] == 16, prompt.name
            tokens = oracle.ids_of_shown(answer.choices[0].tokens)
            assert tokens == choices[0].token_ids, prompt.name
        await baton.wait_at_rest()
        assert not baton.restarts
