"""Requests to the cluster of docker-compose.yml, and what its router tells of its workers."""

from typing import Any

import httpx

from tests.support.answers import Answer, gather_events

COMPLETIONS = "/v1/completions"
GREEDY: dict[str, Any] = {
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}
STREAM: dict[str, Any] = {
    **GREEDY,
    "prompt": "A letter to the harbour master about the weather of last week:",
    "max_tokens": 48,
    "logprobs": 0,
}


async def ask(client: httpx.AsyncClient, path: str = COMPLETIONS, **body: Any) -> Answer:
    """A streamed answer, read to its end."""
    asked = body if "messages" in body or "prompt" in body else {**STREAM, **body}
    async with client.stream("POST", path, json=GREEDY | asked) as response:
        assert response.status_code == 200, await response.aread()
        return await gather_events(response)


async def workers(client: httpx.AsyncClient, role: str) -> list[dict[str, Any]]:
    records = (await client.get("/workers")).json()["workers"]
    return [record for record in records if record["role"] == role]
