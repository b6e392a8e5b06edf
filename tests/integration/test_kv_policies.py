"""KV policies over two workers: the offline tokens, and less to ship."""

from pathlib import Path
from typing import Any

import pytest

from baton.engine.llm import LLM
from baton.store import StoredModel
from baton.v1 import common_pb2
from tests.support.client import PairClient, sampling_pb
from tests.support.cluster import COMPLETIONS, Cluster, running_cluster
from tests.support.tiny import run_decode, run_prefill
from tests.support.transport_pair import NAMES, offline, random_prompt, transport_of

BLOCK_BYTES = 4 * 2 * 2 * 2 * 8 * 4
"""Of the tiny model: 4 tokens, 2 layers, keys and values of 2 heads of 8 float32 values."""
STREAMING = "streaming(sinks=4,window=40)"


@pytest.mark.parametrize(
    "transport", ["shm", *(pytest.param(t, marks=pytest.mark.slow) for t in ("torch", "grpc"))]
)
async def test_a_prompt_beyond_the_context_ships_sinks_and_window(
    tiny_llama: Path, transport: str
) -> None:
    values: dict[str, Any] = {"kv_policy": STREAMING, "num_blocks": 64}
    llm = LLM(tiny_llama, "float32", block_size=4, chunk_size=64, **values)
    async with (
        run_prefill(tiny_llama, transport=transport, **values) as prefill,
        run_decode(tiny_llama, transport=transport, **values) as decode,
        PairClient(prefill, decode) as client,
    ):
        for length, blocks in ((5, 2), (44, 11), (700, 11)):
            prompt, sampling = random_prompt(length, length), {"max_tokens": 90, "ignore_eos": True}
            served = await client.serve(prompt, sampling_pb(**sampling))
            assert served.texts() == offline(llm, prompt, **sampling)
            assert served.prefill_done is not None
            assert served.prefill_done.bytes_sent == blocks * BLOCK_BYTES
            assert transport_of(served) == NAMES[transport]
            await prefill.wait_idle()
            await decode.wait_idle()
        assert decode.parts.engine.scheduler.prefill_tokens_computed == 0


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize(
    ("policy", "length", "blocks"),
    [
        ("snapkv(budget=0.25,window=16)", 161, 11),  # 41 of 161 tokens
        ("snapkv(budget=0.25,window=16)", 30, 5),  # at least the window and one more
        ("streaming(sinks=0,window=1)", 160, 0),  # the next token sees itself
        ("h2o(budget=32)", 161, 8 + 2),  # states of 33 tokens
        ("h2o(budget=32)", 20, 5 + 2),
    ],
)
async def test_what_is_evicted_is_not_shipped(
    tiny_llama: Path, policy: str, length: int, blocks: int, kv_dtype: str
) -> None:
    if kv_dtype == "int8" and policy.startswith("h2o"):
        pytest.skip("refused")
    values: dict[str, Any] = {"kv_policy": policy, "num_blocks": 128, "kv_dtype": kv_dtype}
    llm = LLM(tiny_llama, "float32", block_size=4, chunk_size=64, **values)
    async with (
        run_prefill(tiny_llama, **values) as prefill,
        run_decode(tiny_llama, **values) as decode,
        PairClient(prefill, decode) as client,
    ):
        prompt = random_prompt(length, length)
        for sampling in ({"max_tokens": 40, "ignore_eos": True}, {"max_tokens": 9, "n": 2}):
            served = await client.serve(prompt, sampling_pb(**sampling))
            assert served.texts() == offline(llm, prompt, **sampling)
            assert served.prefill_done is not None
            if kv_dtype == "auto":
                assert served.prefill_done.bytes_sent == blocks * BLOCK_BYTES
        continuation = common_pb2.Continuation(choice=0, output_token_ids=served.texts()[0][:4])
        rest = await client.serve(prompt, sampling_pb(max_tokens=9), continuation=continuation)
        assert rest.texts()[0] == served.texts()[0]
        assert decode.parts.engine.scheduler.prefill_tokens_computed == 0
        await prefill.wait_idle()
        await decode.wait_idle()


@pytest.mark.parametrize(
    "policy", ["streaming(sinks=4,window=24)", "snapkv(budget=16,window=8)", "h2o(budget=16)"]
)
async def test_a_choice_of_a_lost_worker_goes_on_with_the_tokens_it_would_have_given(
    tiny_llama: Path, policy: str
) -> None:
    """What the lost worker had dropped depends on the prompt and the tokens alone."""
    values: dict[str, Any] = {"kv_policy": policy, "num_blocks": 128}
    llm = LLM(tiny_llama, "float32", block_size=4, chunk_size=64, **values)
    sampling = {"temperature": 0.7, "seed": 3, "max_tokens": 48, "ignore_eos": True}
    prompt = random_prompt(30, 3)
    whole = offline(llm, prompt, **sampling, n=2)[1]
    async with (
        run_prefill(tiny_llama, **values) as prefill,
        run_decode(tiny_llama, **values) as decode,
        PairClient(prefill, decode) as client,
    ):
        for done in (1, 15, 40):
            given = common_pb2.Continuation(choice=1, output_token_ids=whole[:done])
            served = await client.serve(prompt, sampling_pb(**sampling), continuation=given)
            assert served.tokens == {1: whole}
        await prefill.wait_idle()
        await decode.wait_idle()


async def ask(cluster: Cluster, **body: Any) -> Any:
    prompt = "Once upon a time there was a cache. " * 8
    own = {"prompt": prompt, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    answer = await cluster.ask(COMPLETIONS, **{**own, **body})
    await cluster.settle()
    return answer


async def test_a_request_may_choose_where_the_workers_keep_everything(
    tiny_chat: StoredModel,
) -> None:
    """Two policies side by side; neither finds the other's blocks, each finds its own."""
    async with running_cluster(tiny_chat, prefills=2, decodes=2) as cluster:
        plain = [await ask(cluster, kv_policy=name) for name in (None, "full", None)]
        assert plain[0].texts == plain[1].texts == plain[2].texts
        assert plain[1].num_cached > 0
        wide = "streaming(sinks=4,window=2000)"
        found = [await ask(cluster, kv_policy=wide) for _ in range(2)]
        assert [answer.num_cached > 0 for answer in found] == [False, True]
        assert found[0].texts == found[1].texts == plain[0].texts
        before = await cluster.totals(cluster.decodes)
        narrow = await ask(cluster, kv_policy=STREAMING)
        shipped = (await cluster.totals(cluster.decodes)).blocks_transferred
        assert narrow.texts != plain[0].texts
        assert shipped - before.blocks_transferred == 4  # 16 tokens each: sinks, window


async def test_a_stream_without_end_goes_beyond_the_context(tiny_chat: StoredModel) -> None:
    async with running_cluster(
        tiny_chat, kv_policy="streaming(sinks=4,window=64)", num_blocks=32
    ) as cluster:
        answer = await ask(cluster, max_tokens=2100, stream=True)
        assert answer.counts[1] == 2100
        long = await ask(cluster, prompt="x" * 3000, max_tokens=4)
        assert long.counts[:2] == (3000, 4)


BAD = {
    "lru": "not a policy",
    "streaming(window=0)": "window",
    "streaming(window=5000)": "context",
    "streaming(windows=5)": "windows",
    "streaming(sinks=4": "not a policy",
    "snapkv(budget=150%)": "100 %",
    "snapkv(budget=0)": "budget",
    "h2o(budget=1.5)": "100 %",
    7: "kv_policy",
}


async def test_a_bad_policy_is_refused_by_name(tiny_chat: StoredModel) -> None:
    async with running_cluster(tiny_chat) as cluster:
        for policy, word in BAD.items():
            response = await cluster.post(COMPLETIONS, prompt="x", kv_policy=policy)
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["param"] == "kv_policy" and word in error["message"]
        beams = {"prompt": "x", "use_beam_search": True, "n": 2, "kv_policy": STREAMING}
        response = await cluster.post(COMPLETIONS, **beams)
        assert response.json()["error"]["param"] == "kv_policy"
        await cluster.settle()


async def test_what_the_operator_chose_a_request_cannot_change(tiny_chat: StoredModel) -> None:
    async with running_cluster(tiny_chat, kv_policy=STREAMING) as cluster:
        same = await ask(cluster, kv_policy=STREAMING)
        assert same.texts == (await ask(cluster)).texts
        response = await cluster.post(COMPLETIONS, prompt="x", kv_policy="full")
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "kv_policy"
