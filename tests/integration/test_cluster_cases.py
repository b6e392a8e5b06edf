"""Hand-offs that once went wrong elsewhere: each test tells how, and what holds here instead."""

import asyncio
import dataclasses
import itertools
import random
import threading
from typing import Any

import pytest
import redis.asyncio as aioredis

from baton.engine.llm import LLM
from baton.engine.sampling_params import SamplingParams
from baton.engine.transfer.base import HandoffDamaged
from baton.store import StoredModel
from decode_service.incoming import IncomingHandoff
from router.text.tokenizer import Tokenizer
from tests.support import cluster as support
from tests.support.answers import Answer
from tests.support.cluster import COMPLETIONS, ORDINARY, Cluster, running_cluster, running_router

BLOCK = 16


@pytest.fixture(scope="module")
def llm(tiny_chat: StoredModel) -> LLM:
    return LLM(tiny_chat.path, "float32", num_blocks=512, enable_prefix_cache=False)


def offline(model: StoredModel, llm: LLM, prompt: list[int], **sampling: Any) -> list[list[bytes]]:
    """Shown tokens per choice."""
    shown = Tokenizer.load(model.path).shown_bytes
    (choices,) = llm.generate([prompt], SamplingParams(**{"temperature": 0.0} | sampling))
    return [[shown(token_id) for token_id in choice.token_ids] for choice in choices]


def random_prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(32, 127), k=length)


async def test_prefixes_evicted_between_look_up_and_use_are_computed_again(
    tiny_chat: StoredModel, llm: LLM
) -> None:
    """A scheduler was promised more cached tokens than were left when it fetched them, and the
    engine died; so it did with Redis at its memory limit. Pools of two prompts, sixteen clients,
    twelve shared prefixes, and a Redis that evicts."""
    prompts = [random_prompt(6 * BLOCK, number) for number in range(12)]
    wanted = [offline(tiny_chat, llm, p, max_tokens=4, ignore_eos=True) for p in prompts]
    async with running_cluster(tiny_chat, num_blocks=16, max_num_seqs=8) as cluster:
        await cluster.learn_the_usual()
        async with aioredis.Redis.from_url(cluster.redis_url) as redis:
            used = (await redis.info("memory"))["used_memory"]
            await redis.config_set("maxmemory-policy", "allkeys-random")
            await redis.config_set("maxmemory", int(used) + 64_000)

        async def client(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(8):
                number = rng.randrange(len(prompts))
                answer = await cluster.ask(
                    COMPLETIONS,
                    prompt=prompts[number],
                    max_tokens=4,
                    ignore_eos=True,
                    temperature=0,
                    logprobs=0,
                )
                assert answer.tokens == wanted[number]

        await asyncio.gather(*(client(seed) for seed in range(16)))
        await cluster.assert_unharmed()


async def test_a_prompt_that_waits_longer_than_its_lease_is_never_answered_from_freed_blocks(
    tiny_chat: StoredModel, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill timed out and freed, decode read the freed blocks. Here the lease of 2 s ends
    while prefill is busy: those requests are tried again or fail, and no text is wrong."""
    prompts = [random_prompt(5 * BLOCK + 3, 50 + number) for number in range(6)]
    wanted = [offline(tiny_chat, llm, p, max_tokens=6, ignore_eos=True) for p in prompts]
    async with running_cluster(tiny_chat, decode={"lease_s": 2.0}) as cluster:
        await cluster.learn_the_usual()
        gate, runner = threading.Event(), cluster.prefills[0].parts.engine._runner
        compute = runner.run

        def busy(batch: Any) -> Any:
            gate.wait(10)
            return compute(batch)

        monkeypatch.setattr(runner, "run", busy)
        bodies: list[dict[str, Any]] = [
            {"prompt": p, "max_tokens": 6, "ignore_eos": True} for p in prompts
        ]
        posts = [cluster.post(COMPLETIONS, **b, temperature=0, logprobs=0) for b in bodies]
        asking = [asyncio.create_task(post) for post in posts]
        (decode,) = cluster.decodes
        await support_until(lambda: decode.parts.engine.blocks.num_promised > 0)
        await support_until(lambda: decode.parts.engine.blocks.num_promised == 0)
        gate.set()
        for response, tokens in zip(await asyncio.gather(*asking), wanted, strict=True):
            if response.status_code == 200:
                assert support.whole_answer(response.json()).tokens == tokens
            else:
                assert response.status_code == 503
        monkeypatch.setattr(runner, "run", compute)
        for body, tokens in zip(bodies, wanted, strict=True):
            answer = await cluster.ask(COMPLETIONS, **body, temperature=0, logprobs=0)
            assert answer.tokens == tokens
        await cluster.assert_unharmed()


async def test_a_prompt_over_the_prefill_limit_is_refused_and_never_decoded(
    tiny_chat: StoredModel,
) -> None:
    """Prefill aborted such a prompt, and decode went on from an incomplete cache."""
    limit = 128
    async with running_cluster(tiny_chat, prefill={"max_model_len": limit}) as cluster:
        await cluster.learn_the_usual()
        for length in (limit, limit + 1, limit + 9):
            for stream in (False, True):
                body = {"prompt": random_prompt(length, length), "max_tokens": 4, "stream": stream}
                response = await cluster.post(COMPLETIONS, **body)
                assert response.status_code == (200 if length == limit else 400)
                if length > limit:
                    assert response.json()["error"]["code"] == "context_length_exceeded"
        await cluster.assert_unharmed()


async def test_hand_offs_of_two_routers_with_the_same_request_id_find_their_own_cache(
    tiny_chat: StoredModel, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sender and receiver derived the transfer key from their own request ids. Here two routers
    get the same id twice each, for different prompts and two choices, while every other
    hand-off is tried again."""
    prompts = [random_prompt(70, 90 + number) for number in range(8)]
    sampling = {"max_tokens": 8, "ignore_eos": True, "n": 2, "seed": 4, "temperature": 0.9}
    wanted = [offline(tiny_chat, llm, p, **sampling, top_k=8) for p in prompts]
    async with running_cluster(tiny_chat, 2, 2) as first:
        await first.learn_the_usual()
        second = dataclasses.replace(first)
        async with running_router(first) as second.router:
            await second.wait_for_workers()
            fail_every_other_first_commit(monkeypatch)
            answers = await asyncio.gather(
                *(
                    ask_as((first, second)[number % 2], "the-same-id", p, **sampling, top_k=8)
                    for number, p in enumerate(prompts)
                )
            )
            assert [answer.tokens for answer in answers] == wanted
            failed = (await first.totals(first.decodes)).handoffs_failed
            assert failed == len(prompts) // 2
            await second.settle()
        await first.assert_unharmed()


def fail_every_other_first_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if damaged; the same reservation is filled by a second attempt."""
    commit, number = IncomingHandoff.commit, itertools.count()

    def sometimes(self: IncomingHandoff, *args: Any) -> None:
        if self._reservation.next_generation == 1 and next(number) % 2 == 0:
            raise HandoffDamaged("on purpose")
        commit(self, *args)

    monkeypatch.setattr(IncomingHandoff, "commit", sometimes)


async def ask_as(cluster: Cluster, request_id: str, prompt: list[int], **body: Any) -> Answer:
    response = await cluster.client.post(
        COMPLETIONS,
        json={"prompt": prompt, "logprobs": 0, **body},
        headers={"x-request-id": request_id},
    )
    assert response.status_code == 200, response.text
    return support.whole_answer(response.json())


@pytest.mark.parametrize(
    ("values", "differs"),
    [({"kv_dtype": "int8"}, "dtype"), ({"num_blocks": 64}, ""), ({"dtype": "bfloat16"}, "")],
)
async def test_workers_with_other_kv_never_exchange_it(
    tiny_chat: StoredModel, values: dict[str, Any], differs: str
) -> None:
    """Prefill with one KV type and decode with another once gave damaged text at low load and a
    crash at high load. What cannot be converted is never exchanged (quantized blocks in a plain
    cache); a pool of another size is no difference, and another plain type is converted."""
    async with running_cluster(tiny_chat, prefill=values) as cluster:
        response = await cluster.post(COMPLETIONS, **ORDINARY)
        if differs:
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "no_prefill_worker"
            await cluster.add_prefill()
            await cluster.wait_for_workers()
        assert (await cluster.ask(COMPLETIONS, **dict[str, Any](ORDINARY))).text
        odd = cluster.prefills[0]
        handoffs = (await cluster.info(odd)).counters.handoffs
        assert (handoffs == 0) == bool(differs)
        await cluster.settle()


async def support_until(condition: Any, timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (the books have no event)
            await asyncio.sleep(0.01)
