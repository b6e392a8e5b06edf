"""Beam search over two workers, and what the gateway takes and refuses of it."""

from pathlib import Path
from typing import Any

import pytest

from baton.engine.llm import LLM
from baton.engine.sampling_params import BeamParams, SamplingParams
from baton.store import StoredModel
from baton.v1 import common_pb2
from router.openai.errors import ApiError
from router.openai.schema import ChatBody, CompletionBody, parse
from tests.support.client import PairClient, sampling_pb
from tests.support.cluster import COMPLETIONS, running_cluster
from tests.support.families import random_tokens
from tests.support.tiny import VOCAB, run_decode, run_prefill


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("length", [1, 8, 37])
async def test_a_split_search_gives_the_offline_beams_after_one_transfer(
    tiny_llama: Path, length: int, kv_dtype: str
) -> None:
    values: dict[str, Any] = {"block_size": 4, "kv_dtype": kv_dtype}
    llm = LLM(tiny_llama, "float32", num_blocks=128, enable_prefix_cache=False, **values)
    prompt = random_tokens(length, length, VOCAB)
    beam = common_pb2.BeamParams(width=4, length_penalty=0.5)
    for max_tokens in (1, 16):
        sampling = SamplingParams(
            temperature=0, n=3, max_tokens=max_tokens, beam=BeamParams(4, 0.5)
        )
        (wanted,) = llm.generate([prompt], sampling)
        async with (
            run_prefill(tiny_llama, num_blocks=128, **values) as prefill,
            run_decode(tiny_llama, num_blocks=128, **values) as decode,
            PairClient(prefill, decode) as client,
        ):
            served = await client.serve(prompt, sampling_pb(n=3, max_tokens=max_tokens, beam=beam))
            assert served.texts() == [choice.token_ids for choice in wanted]
            assert prefill.status.activity.transfers.handoffs == 1
            assert decode.parts.engine.scheduler.prefill_tokens_computed == 0
            await prefill.wait_idle()
            await decode.wait_idle()


BEAMS = {"prompt": "x", "use_beam_search": True, "n": 2}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"stream": True}, "stream"),
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"stop": "x"}, "stop"),
        ({"logprobs": 1}, "logprobs"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"n": 1}, "use_beam_search"),
        ({"length_penalty": 1e9}, "length_penalty"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
        ({"use_beam_search": None, "early_stopping": True}, "early_stopping"),
        ({"best_of": 1}, "best_of"),
    ],
)
def test_what_does_not_go_with_beams_is_refused_by_name(
    changes: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        parse(CompletionBody, BEAMS | changes)
    assert caught.value.param == param


def test_the_width_is_best_of_in_completions_and_n_in_chats() -> None:
    assert parse(CompletionBody, BEAMS | {"best_of": 5}).beam_width == 5
    chat = {"messages": [{"role": "user", "content": "x"}], "use_beam_search": True, "n": 3}
    assert parse(ChatBody, chat | {"early_stopping": "never"}).beam_width == 3


async def test_the_gateway_answers_with_the_best_beams_whichever_worker_prefills(
    tiny_chat: StoredModel,
) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 12, "n": 2, "best_of": 4}
    answers = []
    for prefills in (1, 0):
        router = {"decode_prefills": "never" if prefills else "auto"}
        async with running_cluster(
            tiny_chat, prefills=prefills, decodes=1, router=router
        ) as cluster:
            answer = await cluster.ask(COMPLETIONS, use_beam_search=True, **body)
            answers.append(answer.texts)
            assert (await cluster.totals(cluster.decodes)).handoffs == prefills
            await cluster.settle()
    assert answers[0] == answers[1]
    assert len(set(answers[0])) == 2
