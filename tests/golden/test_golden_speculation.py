"""The real model answers the same with drafts as without: in fp32, over a quantized cache, and in
bf16 where the kernels do not depend on the batch.
"""

from typing import Any

import pytest

from baton.store import StoredModel
from tests.golden.prompts import GoldenPrompt
from tests.support.cluster import CHAT, COMPLETIONS, running_cluster, shared_weights
from tests.support.drafts import looking_up

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

CODE = "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n"
COPY = [{"role": "user", "content": f"Repeat this text exactly, and nothing else:\n\n{CODE}"}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": COPY, "temperature": 0, "logprobs": True}),
    (CHAT, {"messages": COPY, "temperature": 0.7, "seed": 3, "n": 3, "frequency_penalty": 0.2}),
    (COMPLETIONS, {"prompt": CODE * 2, "temperature": 0, "stop": ["depth)"], "min_tokens": 3}),
]


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("float32", "auto"), ("float32", "int8"), ("bfloat16", "auto")]
)
async def test_drafts_change_no_answer_of_the_real_model(
    smollm2: StoredModel, prompts: list[GoldenPrompt], dtype: str, kv_dtype: str
) -> None:
    model, _ = shared_weights(smollm2.path, dtype)
    if dtype == "bfloat16" and not model.reads_in_place:
        pytest.skip("no kernels for this machine: bf16 depends on the batch")
    bodies = BODIES + [(p.path, {**p.body, "temperature": 0}) for p in prompts[::6]]
    async with running_cluster(
        dtype=dtype, kv_dtype=kv_dtype, router={"decode_prefills": "never"}
    ) as cluster:
        (worker,) = cluster.decodes
        accepted = 0
        for path, body in bodies:
            body = {**body, "max_tokens": 48}
            worker.scheduler.drafting = None
            plain = await cluster.ask(path, **body)
            worker.scheduler.drafting = looking_up()
            drafted = await cluster.ask(path, **body)
            assert (drafted.texts, drafted.reasons) == (plain.texts, plain.reasons)
            assert drafted.tokens == plain.tokens
            assert drafted.counts == plain.counts
            accepted += worker.scheduler.drafting.tokens_accepted
        assert accepted > 20
        await cluster.settle()
