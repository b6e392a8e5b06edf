"""One streamed request, timed as a client sees it.

The definitions are those of vLLM's `bench serve` (benchmarks/lib/endpoint_request_func.py): the
clock starts before the request is sent; the first chunk with choices ends TTFT; each later one
adds an inter-token latency; the last one ends the request's latency.
"""

import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from baton.loadgen.workload import PlannedRequest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MAX_ERROR_CHARS = 300


@dataclass(frozen=True)
class Target:
    """Where requests go and how they ask."""

    url: str
    model: str
    path: str = COMPLETIONS
    prompt_as_text: bool = False
    ignore_eos: bool = True
    temperature: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)

    def body(self, request: PlannedRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.path == CHAT:
            return {**body, "messages": [{"role": "user", "content": request.words()}]}
        as_text = self.prompt_as_text or request.text is not None
        return {**body, "prompt": request.words() if as_text else request.token_ids()}


@dataclass
class Outcome:
    """What came of one request; times in seconds, `sent_at` from the start of the run."""

    sent_at: float
    planned_at: float
    ttft_s: float = 0.0
    latency_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    request_id: str = ""

    @property
    def tpot_s(self) -> float | None:
        """(latency - TTFT) / (output tokens - 1); None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1)


class SseReader:
    """Bytes in, JSON events out; an event may be cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""
        self.done = False

    def feed(self, data: bytes) -> list[Any]:
        """Raises ValueError when the server sends what is not JSON."""
        *events, self._rest = (self._rest + data.replace(b"\r\n", b"\n")).split(b"\n\n")
        found = []
        for event in events:
            for line in event.split(b"\n"):
                if not line.startswith(b"data:"):
                    continue
                payload = line[5:].strip()
                if payload == b"[DONE]":
                    self.done = True
                else:
                    found.append(json.loads(payload))
        return found


async def send(
    session: aiohttp.ClientSession, target: Target, request: PlannedRequest, started: float
) -> Outcome:
    """Never raises but for cancellation: what went wrong is in the outcome."""
    body = json.dumps(target.body(request)).encode()
    begin = last = time.perf_counter()
    outcome = Outcome(begin - started, request.at_s)
    headers = {"content-type": "application/json", **target.headers}
    try:
        async with session.post(target.url + target.path, data=body, headers=headers) as response:
            outcome.request_id = response.headers.get("x-request-id", "")
            if response.status != 200:
                text = (await response.text())[:MAX_ERROR_CHARS]
                outcome.error = f"HTTP {response.status}: {text}"
                return outcome
            reader = SseReader()
            async for data in response.content.iter_any():
                for event in reader.feed(data):
                    now = time.perf_counter()
                    if _take(outcome, event, now - begin, now - last):
                        last = now
            outcome.latency_s = last - begin
            if outcome.error is None and not (reader.done and outcome.ttft_s):
                outcome.error = "the stream ended early"
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        outcome.error = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
    return outcome


def _take(outcome: Outcome, event: Any, since_begin: float, since_last: float) -> bool:
    """True when the event carried choices."""
    if error := event.get("error"):
        outcome.error = str(error.get("message", error) if isinstance(error, dict) else error)
        return False
    if usage := event.get("usage"):
        outcome.prompt_tokens = usage.get("prompt_tokens", 0)
        outcome.output_tokens = usage.get("completion_tokens", 0)
        details = usage.get("prompt_tokens_details") or {}
        outcome.cached_tokens = details.get("cached_tokens") or 0
    if not event.get("choices"):
        return False
    if outcome.ttft_s == 0.0:
        outcome.ttft_s = since_begin
    else:
        outcome.itl_s.append(since_last)
    return True
