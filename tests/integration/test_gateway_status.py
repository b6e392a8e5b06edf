"""What the gateway tells about its workers, and about a model that cannot chat."""

from pathlib import Path

import orjson
import pytest

from tests.support.byte_model import byte_model
from tests.support.gateway import CHAT, COMPLETIONS, USER_HI, running_gateway
from tests.support.stub_workers import scripted


async def test_workers_are_listed_as_the_registry_records_them(tmp_path: Path) -> None:
    async with running_gateway(byte_model(tmp_path), scripted("x"), prefills=2) as gateway:
        response = await gateway.client.get("/workers")
        records = gateway.cluster.directory.snapshot()
        assert response.status_code == 200
        assert response.json()["workers"] == [orjson.loads(record.to_json()) for record in records]
        assert len(records) == 3


async def test_what_a_worker_says_of_its_fault_is_not_shown_with_its_cache(tmp_path: Path) -> None:
    """`GET /v1/cache` answered with the text of the worker's exception. These workers know no such
    call."""
    async with running_gateway(byte_model(tmp_path), scripted("x")) as gateway:
        caches = (await gateway.client.get("/v1/cache")).json()["data"]
        assert {cache["worker"] for cache in caches} == {"prefill-0", "decode-0"}
        assert {cache["error"] for cache in caches} == {"UNIMPLEMENTED"}


async def test_chat_with_a_model_without_a_template_is_a_clear_400(tmp_path: Path) -> None:
    model = byte_model(tmp_path, template=None)
    async with running_gateway(model, scripted("x")) as gateway:
        response = await gateway.post(CHAT, {"messages": USER_HI})
        assert response.status_code == 400
        assert "no chat template" in response.json()["error"]["message"]
        assert (await gateway.post(COMPLETIONS, {"prompt": "hi"})).status_code == 200


@pytest.mark.parametrize("value", [1, 1.0, 0, 0.0])
async def test_a_length_penalty_that_changes_nothing_is_taken(tmp_path: Path, value: float) -> None:
    async with running_gateway(byte_model(tmp_path), scripted("x")) as gateway:
        body = {"prompt": "hi", "length_penalty": value}
        assert (await gateway.post(COMPLETIONS, body)).status_code == 200
