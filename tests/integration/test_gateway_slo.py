"""Targets, priorities and explanations over real HTTP, with scripted workers."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.cli.explain import Question, explain
from baton.cluster.errors import BatonError
from baton.cluster.prefix_index import PrefixMatches
from baton.cluster.workers import WorkerRecord
from router.text import TextModel
from tests.support.byte_model import byte_model
from tests.support.candidates import speed
from tests.support.gateway import CHAT, COMPLETIONS, USER_HI, RunningGateway, running_gateway
from tests.support.stub_workers import scripted

BODY = {"prompt": "hello", "max_tokens": 4}
EXPLAIN = {"x-baton-explain": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return byte_model(Path(tmp_path_factory.mktemp("model")))


@pytest.fixture
async def gateway(model: TextModel) -> AsyncIterator[RunningGateway]:
    async with running_gateway(model, scripted("abcdef"), prefills=2) as running:
        yield running


@pytest.mark.parametrize(
    ("slo", "field"),
    [
        ({"ttft_ms": -1}, "slo.ttft_ms"),
        ({"tpot_ms": 1e-322}, "slo.tpot_ms"),
        ({"tpot_ms": "5"}, "slo.tpot_ms"),
        ({"policy": "drop"}, "slo.policy"),
        ({"ttft": 5}, "slo.ttft"),
        ("fast", "slo"),
    ],
)
async def test_a_wrong_slo_is_refused_by_field(
    gateway: RunningGateway, slo: object, field: str
) -> None:
    response = await gateway.post(COMPLETIONS, {**BODY, "slo": slo})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "slo"
    assert field in response.json()["error"]["message"]
    assert gateway.cluster.calls == 0


@pytest.mark.parametrize(
    "text", ["soon", "-5", "nan", "inf", "1_000", "0x10", "1e400", "1e-322", ""]
)
async def test_a_wrong_header_is_refused_by_name(gateway: RunningGateway, text: str) -> None:
    response = await gateway.post(COMPLETIONS, BODY, headers={"x-baton-ttft-ms": text})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "x-baton-ttft-ms"
    assert gateway.cluster.calls == 0


async def test_targets_travel_to_the_worker_as_a_deadline(gateway: RunningGateway) -> None:
    await gateway.post(COMPLETIONS, BODY)
    await gateway.post(COMPLETIONS, {**BODY, "slo": {"ttft_ms": 5000}})
    first, second = (request for p in gateway.cluster.prefills for request in p.counters.requests)
    deadlines = {first.HasField("deadline_s"), second.HasField("deadline_s")}
    assert deadlines == {True, False}
    assert 0 < max(first.deadline_s, second.deadline_s) <= 5.0


async def test_kept_and_missed_targets_are_counted(gateway: RunningGateway) -> None:
    await gateway.post(COMPLETIONS, BODY, headers={"x-baton-ttft-ms": "60000"})
    await gateway.post(COMPLETIONS, BODY, headers={"x-baton-tpot-ms": "0.001"})
    metrics = (await gateway.client.get("/metrics")).text
    assert 'baton_targets_total{met="true",target="ttft"} 1.0' in metrics
    assert 'baton_targets_total{met="false",target="tpot"} 1.0' in metrics


async def test_an_explanation_names_the_choice_its_numbers_and_the_alternatives(
    gateway: RunningGateway,
) -> None:
    slo = {"ttft_ms": 700, "policy": "best_effort"}
    response = await gateway.post(COMPLETIONS, {**BODY, "slo": slo}, headers=EXPLAIN)
    (decision,) = response.json()["placement"]
    assert decision["policy"] == "slo"
    assert decision["targets"]["ttft_ms"] == 700 and decision["targets"]["tpot_ms"] is None
    chosen = decision["chosen"]
    assert (chosen["prefill"], chosen["decode"]) == ("prefill-0", "decode-0")
    assert chosen["ttft_ms"] == pytest.approx(
        sum(chosen[f"{part}_ms"] for part in ("waited", "admit", "queue", "prefill")), abs=0.01
    )
    assert decision["measured_ttft_ms"] > 0
    assert [a["prefill"] for a in decision["alternatives"]] == ["prefill-1"]


async def test_a_miss_says_what_the_next_best_workers_were_predicted_to_give(
    gateway: RunningGateway,
) -> None:
    headers = {"x-baton-ttft-ms": "0.001", "x-request-id": "late"}
    await gateway.post(COMPLETIONS, BODY, headers=headers)
    found = (await gateway.client.get("/v1/requests/late")).json()
    assert [miss["target"] for miss in found["misses"]] == ["ttft"]
    workers = {found["placement"][way]["prefill"] for way in ("chosen", "other")}
    assert workers == {"prefill-0", "prefill-1"}
    assert found["placement"]["other"]["ttft_ms"] > 0


async def test_nobody_else_gets_an_explanation(gateway: RunningGateway) -> None:
    assert "placement" not in (await gateway.post(COMPLETIONS, BODY)).json()


async def test_a_stream_ends_with_the_explanation(gateway: RunningGateway) -> None:
    body = {"messages": USER_HI, "max_tokens": 3, "stream_options": {"include_usage": True}}
    events = await gateway.events(CHAT, body, headers=EXPLAIN)
    assert events[-1] == "[DONE]" and events[-2]["usage"]["completion_tokens"] == 3
    assert events[-2]["choices"] == []
    assert events[-2]["placement"][0]["chosen"]["decode"] == "decode-0"


@pytest.mark.parametrize("policy", ["least_loaded", "round_robin", "prefix", "power_of_two"])
async def test_a_policy_is_chosen_by_name(model: TextModel, policy: str) -> None:
    text = scripted("abcdef")
    async with running_gateway(model, text, prefills=2, policy=policy) as gateway:
        for _ in range(4):
            response = await gateway.post(COMPLETIONS, BODY, headers=EXPLAIN)
            assert response.json()["choices"][0]["text"] == "abcd"
            assert response.json()["placement"][0]["policy"] == policy
        calls = [worker.counters.calls for worker in gateway.cluster.prefills]
        assert sum(calls) == 4
        if policy == "round_robin":
            assert calls == [2, 2]


async def test_decode_prefills_where_that_is_predicted_better(model: TextModel) -> None:
    async with running_gateway(model, scripted("abcdef"), decode_prefills="auto") as gateway:
        (prefill,), (decode,) = gateway.cluster.prefills, gateway.cluster.decodes
        directory = gateway.cluster.directory
        for factor, prefilled_by in ((5.0, None), (0.2, "prefill-0")):
            directory.put(prefill.record, profile=speed(factor))
            directory.put(decode.record, profile=speed(1.0))
            response = await gateway.post(COMPLETIONS, BODY, headers=EXPLAIN)
            assert response.json()["choices"][0]["text"] == "abcd"
            assert response.json()["placement"][0]["chosen"]["prefill"] == prefilled_by
        assert [r.prefill_here for r in decode.counters.requests] == [True, False]
        assert prefill.counters.calls == 1


class NotedIndex:
    """Says that nothing is cached, and notes what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    async def lookup(self, *_: Any) -> PrefixMatches:
        return PrefixMatches()

    @contextmanager
    def expecting(self, _: Any, workers: list[WorkerRecord]) -> Iterator[None]:
        (worker,) = workers
        self.events.append(("told", worker.worker_id))
        try:
            yield
        except Exception:
            self.events.append(("taken back", worker.worker_id))
            raise


async def test_what_was_refused_is_expected_nowhere_and_what_has_landed_at_decode(
    model: TextModel,
) -> None:
    """A prompt that decode had given back counted as on its way there, for siblings to follow."""
    index = NotedIndex()
    async with running_gateway(model, scripted("abcdef"), decodes=2) as gateway:
        full, other = gateway.cluster.decodes
        full.behaviour.capacity = 0
        conductor = gateway.gateway.ready_model()[1]
        conductor.selection = replace(conductor.selection, index=index)  # type: ignore[arg-type]
        response = await gateway.post(COMPLETIONS, BODY)
        assert response.json()["choices"][0]["text"] == "abcd"
    assert index.events == [
        ("told", "prefill-0"),
        ("taken back", "prefill-0"),
        ("told", "prefill-0"),
        ("told", other.worker_id),
    ]


async def test_baton_explain_shows_the_decision_as_a_table(
    gateway: RunningGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    question = Question(gateway.url, "hello", 4, ttft_ms=500.0, tpot_ms=None)
    await asyncio.to_thread(explain, question, as_json=False)
    shown = capsys.readouterr().out
    assert "slo: ttft 500 ms" in shown and "Measured time to first token" in shown
    chosen, other = (line.split() for line in shown.splitlines() if "decode-0" in line)
    assert chosen[:3] == ["chosen", "prefill-0", "decode-0"] and other[0] == "prefill-1"
    wrong = Question(gateway.url, "", 4, None, None)
    with pytest.raises(BatonError, match="prompt must not be empty"):
        await asyncio.to_thread(explain, wrong, as_json=True)
