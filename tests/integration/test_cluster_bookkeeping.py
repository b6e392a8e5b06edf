"""Three hundred mixed requests over small pools: afterwards the books say exactly what happened.

The tiny random model, through the router: every answer is compared with the offline one, so a
block that was given to two owners shows as wrong text too.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from baton.engine.llm import LLM, Choice
from baton.engine.sampling_params import SamplingParams
from baton.store import StoredModel
from router.text.tokenizer import Tokenizer
from tests.support.answers import Answer
from tests.support.cluster import COMPLETIONS, Cluster, running_cluster

BLOCK = 16
POOL = 50
IN_FLIGHT = 16


ONE_PAIR = pytest.param((1, 1), id="1P1D", marks=pytest.mark.slow)
TWO_PAIRS = pytest.param((2, 2), id="2P2D")


@pytest.fixture(params=[ONE_PAIR, TWO_PAIRS])
async def cluster(request: pytest.FixtureRequest, tiny_chat: StoredModel) -> AsyncIterator[Cluster]:
    prefills, decodes = request.param
    async with running_cluster(
        tiny_chat, prefills, decodes, num_blocks=POOL, max_num_seqs=32
    ) as cluster:
        await cluster.learn_the_usual()
        yield cluster


@pytest.fixture(scope="module")
def llm(tiny_chat: StoredModel) -> LLM:
    return LLM(tiny_chat.path, "float32", num_blocks=512, enable_prefix_cache=False)


@dataclass(frozen=True)
class Request:
    """`wanted`: the offline answer; `cancel_after_s`: the client leaves then."""

    prompt: list[int]
    sampling: dict[str, Any]
    wanted: list[Choice] = field(default_factory=list)
    cancel_after_s: float | None = None

    @property
    def body(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "logprobs": 0, **self.sampling}

    @property
    def needs_decode(self) -> bool:
        return any(len(choice.token_ids) > 1 for choice in self.wanted)

    @property
    def may_end_while_sending(self) -> bool:
        """A prompt may come in two chunks when others share the step."""
        several_chunks = len(self.prompt) > BLOCK
        return several_chunks and self.sampling["max_tokens"] > 1 and not self.needs_decode


def mixed_requests(llm: LLM, count: int, cancels: bool) -> list[Request]:
    rng = random.Random(count)
    hit = [rng.randrange(97, 123) for _ in range(6 * BLOCK)]
    requests = []
    for i in range(count):
        prompt = [rng.randrange(32, 127) for _ in range(rng.randrange(1, 200))]
        sampling: dict[str, Any] = {
            "max_tokens": rng.randrange(2, 100),
            "temperature": rng.choice([0, 0.9]),
            # Few candidates: a draw hits the rounding of a boundary once in 10^6 tokens or so.
            "top_k": 8,
            "seed": i,
            "ignore_eos": rng.random() < 0.8,
        }
        kind = ("plain", "four choices", "one token", "full hit", "stop on token 1")[i % 5]
        if kind == "four choices":
            sampling |= {"n": 4, "temperature": 1.0, "max_tokens": rng.randrange(2, 40)}
        elif kind == "one token":
            sampling |= {"max_tokens": 1, "n": rng.choice([1, 3])}
        elif kind == "full hit":
            prompt = hit[: rng.randrange(1, 7) * BLOCK]
        elif kind == "stop on token 1":
            ((first,),) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1))
            sampling |= {"temperature": 0, "stop_token_ids": first.token_ids}
        (wanted,) = llm.generate([prompt], SamplingParams(**sampling))
        leaves = rng.random() * 0.6 if cancels and i % 2 else None
        requests.append(Request(prompt, sampling, wanted, leaves))
    return requests


async def serve(cluster: Cluster, request: Request, stream: bool) -> Answer | None:
    """None when the client left before the end."""
    asking = cluster.ask(COMPLETIONS, stream=stream, **request.body)
    try:
        async with asyncio.timeout(request.cancel_after_s):
            return await asking
    except TimeoutError:
        return None


async def serve_all(cluster: Cluster, requests: list[Request]) -> list[Answer | None]:
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def one(i: int, request: Request) -> Answer | None:
        async with slots:
            return await serve(cluster, request, stream=i % 3 == 0)

    return await asyncio.gather(*(one(i, request) for i, request in enumerate(requests)))


def assert_offline_tokens(model: StoredModel, request: Request, answer: Answer) -> None:
    shown = Tokenizer.load(model.path).shown_bytes
    for choice, wanted in zip(answer.choices, request.wanted, strict=True):
        ids = wanted.token_ids[: len(wanted.token_ids) - (choice.finish_reason == "stop")]
        assert choice.tokens == [shown(token_id) for token_id in ids]
    assert answer.counts[1] == sum(len(choice.token_ids) for choice in request.wanted)


async def test_after_three_hundred_mixed_requests_the_books_are_exact(
    cluster: Cluster, tiny_chat: StoredModel, llm: LLM
) -> None:
    # 1) Without cancels every count is known exactly.
    before = [await cluster.totals(side) for side in (cluster.prefills, cluster.decodes)]
    requests = await asyncio.to_thread(mixed_requests, llm, 180, cancels=False)
    await cluster.wait_for_workers()
    answers = await serve_all(cluster, requests)
    served = [answer for answer in answers if answer is not None]
    assert len(served) == len(requests)
    for request, answer in zip(requests, served, strict=True):
        assert_offline_tokens(tiny_chat, request, answer)
    await cluster.settle()
    prefill, decode = [await cluster.totals(side) for side in (cluster.prefills, cluster.decodes)]
    expected = sum(request.needs_decode for request in requests)
    assert prefill.handoffs - before[0].handoffs == expected
    assert decode.handoffs - before[1].handoffs == expected
    # What was sent before the first token turned out to be the last one never commits.
    overtaken = [r for r in requests if r.may_end_while_sending]
    for failed in (prefill.handoffs_failed, decode.handoffs_failed):
        assert failed <= len(overtaken)
    sent_in_vain = sum(len(request.prompt) // BLOCK for request in overtaken)
    assert 0 <= prefill.blocks_transferred - decode.blocks_transferred <= sent_in_vain
    computed = sum(answer.counts[0] - answer.num_cached for answer in served)
    assert prefill.prefill_tokens_computed - before[0].prefill_tokens_computed == computed
    cached = sum(answer.num_cached for answer in served)
    assert prefill.prefill_tokens_cached - before[0].prefill_tokens_cached == cached > 0
    assert decode.prefill_tokens_computed == 0, "decode prefilled by itself"
    assert decode.preemptions > 0, "the pools were not small enough to prove anything"

    # 2) With cancels at random times nothing is left behind.
    requests = await asyncio.to_thread(mixed_requests, llm, 120, cancels=True)
    await cluster.wait_for_workers()
    answers = await serve_all(cluster, requests)
    assert any(answer is None for answer in answers), "nobody left early"
    for request, maybe in zip(requests, answers, strict=True):
        if maybe is None:
            assert request.cancel_after_s is not None
        else:
            assert_offline_tokens(tiny_chat, request, maybe)
    await cluster.settle()
    left = sum(answer is None for answer in answers)
    sure = sum(r.needs_decode for r, a in zip(requests, answers, strict=True) if a is not None)
    for side, seen in ((cluster.prefills, prefill), (cluster.decodes, decode)):
        handoffs = (await cluster.totals(side)).handoffs - seen.handoffs
        assert sure <= handoffs <= sure + left
    assert (await cluster.totals(cluster.decodes)).prefill_tokens_computed == 0
    await cluster.assert_unharmed()
