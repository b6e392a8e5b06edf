"""Early refusal and the order of turns, over real HTTP with scripted workers."""

import asyncio
from pathlib import Path

import pytest

from router.text import TextModel
from tests.support.byte_model import byte_model
from tests.support.candidates import speed
from tests.support.gateway import COMPLETIONS, running_gateway, until
from tests.support.stub_workers import scripted

BODY = {"prompt": "hello", "max_tokens": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return byte_model(Path(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("target", ["ttft_ms", "tpot_ms"])
async def test_who_would_rather_be_refused_than_late_is_told_what_is_predicted(
    model: TextModel, target: str
) -> None:
    """The profile says 15 ms for the prompt and 22 ms a token."""
    async with running_gateway(model, scripted("abcdef")) as gateway:
        for worker in gateway.cluster.workers:
            gateway.cluster.directory.put(worker.record, profile=speed())
        slo = {target: 5.0, "policy": "reject"}
        refused = await gateway.post(COMPLETIONS, {**BODY, "slo": slo})
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        error = refused.json()["error"]
        assert error["code"] == "targets_unattainable"
        assert error["predicted"]["ttft_ms"] >= 10
        assert error["predicted"]["tpot_ms"] == pytest.approx(22, rel=0.3)
        header = refused.headers["x-baton-predicted-ttft-ms"]
        assert float(header) == error["predicted"]["ttft_ms"]
        assert gateway.cluster.calls == 0
        slo = {target: 60_000.0, "policy": "reject"}
        assert (await gateway.post(COMPLETIONS, {**BODY, "slo": slo})).status_code == 200
        slo = {target: 5.0, "policy": "best_effort"}
        assert (await gateway.post(COMPLETIONS, {**BODY, "slo": slo})).status_code == 200


async def test_it_is_refused_as_soon_as_its_target_passes_in_the_queue(model: TextModel) -> None:
    async with running_gateway(model, scripted("abcdef"), max_running=1) as gateway:
        (decode,) = gateway.cluster.decodes
        decode.behaviour.hang, decode.behaviour.fail_at = True, 2
        first = asyncio.create_task(gateway.post(COMPLETIONS, BODY))
        await until(lambda: decode.counters.running == 1)
        slo = {"ttft_ms": 50.0, "policy": "reject"}
        refused = await gateway.post(COMPLETIONS, {**BODY, "slo": slo})
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "targets_unattainable"
        first.cancel()


async def test_turns_go_by_priority_and_then_by_deadline(model: TextModel) -> None:
    async with running_gateway(model, scripted("abcdef"), max_running=1) as gateway:
        (decode,) = gateway.cluster.decodes
        decode.behaviour.hang, decode.behaviour.fail_at = True, 2
        first, tasks = asyncio.create_task(gateway.post(COMPLETIONS, BODY)), []
        await until(lambda: decode.counters.running == 1)
        wishes = {
            "plain": {},
            "later": {"x-baton-ttft-ms": "9000"},
            "soon": {"x-baton-ttft-ms": "5000"},
            "high": {"x-baton-priority": "1"},
        }
        for number, headers in enumerate(wishes.values()):
            body = {**BODY, "prompt": "q" * (number + 1)}
            tasks.append(asyncio.create_task(gateway.post(COMPLETIONS, body, headers=headers)))
            await until(lambda n=number: gateway.gateway.admission.waiting == n + 1)
        decode.behaviour.hang = False
        first.cancel()
        assert {r.status_code for r in await asyncio.gather(*tasks)} == {200}
        turns = [len(request.prompt_token_ids) for request in decode.counters.requests[1:]]
        assert [list(wishes)[length - 1] for length in turns] == ["high", "soon", "later", "plain"]
