"""`baton up` as real processes: says that it is ready, heals, serves `openai`, leaves nothing."""

import asyncio
import json
import shlex
import signal
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import psutil
import pytest
import pytest_asyncio

from tests.support.answers import whole_answer
from tests.support.cluster import COMPLETIONS, ORDINARY
from tests.support.up import Up, baton_up

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

USER: Any = [{"role": "user", "content": "Say hello in French."}]
FLAGS = ("--kv-memory", "64MiB")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up() -> AsyncIterator[Up]:
    async with baton_up(*FLAGS) as up:
        yield up


@pytest_asyncio.fixture(loop_scope="module")
async def client(up: Up) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{up.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


async def ask(up: Up, **body: Any) -> str:
    async with httpx.AsyncClient(base_url=up.url, timeout=60) as client:
        response = await client.post(COMPLETIONS, json={**ORDINARY, **body})
        assert response.status_code == 200, response.text
        return whole_answer(response.json()).text


async def test_the_sample_request_that_it_prints_works(up: Up) -> None:
    text = await up.line(lambda line: "curl http" in line, 10)
    rest = await up.line(lambda line: True, 10, since=up.lines.index(text) + 1)
    parts = [line.split("│ ", 1)[1] for line in (text, rest)]
    words = shlex.split(parts[0].rstrip("\\") + parts[1])
    url, data = words[1], json.loads(words[words.index("-d") + 1])
    async with httpx.AsyncClient(timeout=60) as client:
        response = await client.post(url, json={**data, "max_tokens": 8})
    assert response.status_code == 200
    assert response.json()["choices"][0]["message"]["content"]


async def test_prefill_decode_router_and_redis_are_processes_of_their_own(up: Up) -> None:
    commands = [" ".join(child.cmdline()) for child in up.children()]
    for part in ("baton prefill", "baton decode", "router", "redis-server"):
        assert len([command for command in commands if part in command]) == 1, part


async def test_the_openai_client_chats_whole_and_streamed(
    client: openai.AsyncOpenAI,
) -> None:
    (model,) = (await client.models.list()).data
    body: Any = {"model": model.id, "messages": USER, "max_tokens": 12, "temperature": 0}
    whole = await client.chat.completions.create(**body)
    assert whole.usage is not None and whole.usage.completion_tokens <= 12
    text, usage, reasons = "", None, []
    stream = await client.chat.completions.create(
        **body, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert whole.choices[0].message.content and text
    assert reasons == [whole.choices[0].finish_reason]
    assert usage is not None and usage.total_tokens == whole.usage.total_tokens


async def test_the_openai_client_completes_text(client: openai.AsyncOpenAI) -> None:
    (model,) = (await client.models.list()).data
    body: Any = {"model": model.id, "prompt": "2, 4, 6, 8,", "max_tokens": 8, "seed": 1, "n": 2}
    whole = await client.completions.create(**body, logprobs=1)
    assert [choice.index for choice in whole.choices] == [0, 1]
    texts = ["", ""]
    async for chunk in await client.completions.create(**body, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert all(texts)


async def test_the_openai_client_sees_a_bad_request_as_one(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        await client.completions.create(model="smollm2", prompt="Hi", max_tokens=0)
    with pytest.raises(openai.NotFoundError, match="other"):
        await client.completions.create(model="other", prompt="Hi")


async def test_a_killed_decode_worker_is_said_restarted_and_serves_again(up: Up) -> None:
    body = {"temperature": 0.8, "seed": 123, "max_tokens": 24}
    seeded = await ask(up, **body)
    since, old = len(up.lines), up.child("baton decode")
    old.kill()
    said = await up.line(lambda line: "starting it again" in line, 10, since)
    assert "decode" in said
    await up.line(lambda line: "ready role=decode" in line, 60, since)
    assert up.child("baton decode").pid != old.pid
    assert await _ask_when_ready(up, body) == seeded, "the seed alone makes the text"


async def _ask_when_ready(up: Up, body: dict[str, Any]) -> str:
    async with httpx.AsyncClient(base_url=up.url, timeout=60) as client, asyncio.timeout(30):
        while (await client.get("/health/ready")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return await ask(up, **body)


async def test_sigterm_ends_every_process_with_code_0() -> None:
    async with baton_up(*FLAGS) as up:
        family = up.children()
        assert len(family) >= 4
        assert await up.stop(signal.SIGTERM) == 0
        left = [process for process in family if process.is_running()]
        assert [p for p in left if p.status() != psutil.STATUS_ZOMBIE] == []
        assert not any("Traceback" in line for line in up.lines), up.lines
