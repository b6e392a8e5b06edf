"""How answers look: chat and text completions, whole and in chunks.

Pure: generated text in, JSON bytes out. A token whose bytes are not a whole character shows
as escaped bytes in logprobs, as OpenAI does, so that no U+FFFD stands for good text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from router.generation import TokenLogprob
from router.openai.sse import ChunkWriter


@dataclass(frozen=True)
class ChoiceText:
    """One whole choice."""

    text: str
    logprobs: Sequence[TokenLogprob] | None
    finish_reason: str | None


@dataclass(frozen=True)
class Head:
    """What every answer and chunk of a request carries."""

    id: str
    created: int
    model: str


class Format(Protocol):
    """`fields` stand beside the choices: usage, timing. `count`: the chunks from there on say how
    many tokens there are by then."""

    def opening(self, index: int, echo: str) -> bytes: ...
    def delta(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> bytes: ...
    def finish(self, index: int, reason: str) -> bytes: ...
    def count(self, num_prompt_tokens: int, num_output_tokens: int) -> None: ...
    def closing(self, fields: dict[str, Any]) -> bytes: ...
    def whole(self, choices: Sequence[ChoiceText], fields: dict[str, Any]) -> bytes: ...


class ChatFormat:
    def __init__(self, head: Head, include_usage: bool, logprobs: int | None) -> None:
        self._head = head
        self._writer = ChunkWriter(_fields(head, "chat.completion.chunk"), include_usage)
        self._logprobs = logprobs

    def opening(self, index: int, echo: str) -> bytes:
        return self._writer.choice(
            index,
            b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null',
        )

    def delta(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        shown = b"null"
        if self._logprobs is not None:
            shown = orjson.dumps(_chat_logprobs(logprobs))
        return self._writer.choice(
            index,
            b'"delta":{"content":%b},"logprobs":%b,"finish_reason":null'
            % (orjson.dumps(text), shown),
        )

    def finish(self, index: int, reason: str) -> bytes:
        return self._writer.choice(
            index, b'"delta":{},"logprobs":null,"finish_reason":"%b"' % reason.encode()
        )

    def count(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        self._writer.count(num_prompt_tokens, num_output_tokens)

    def closing(self, fields: dict[str, Any]) -> bytes:
        return self._writer.closing(fields)

    def whole(self, choices: Sequence[ChoiceText], fields: dict[str, Any]) -> bytes:
        shown = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text},
                "logprobs": None if choice.logprobs is None else _chat_logprobs(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return orjson.dumps({**_fields(self._head, "chat.completion"), "choices": shown, **fields})


class CompletionFormat:
    def __init__(self, head: Head, include_usage: bool, logprobs: int | None) -> None:
        self._head = head
        self._writer = ChunkWriter(_fields(head, "text_completion"), include_usage)
        self._logprobs = logprobs

    def opening(self, index: int, echo: str) -> bytes:
        return self.delta(index, echo, ()) if echo else b""

    def delta(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        shown = b"null"
        if self._logprobs is not None:
            shown = orjson.dumps(_text_logprobs(logprobs, self._logprobs))
        return self._writer.choice(
            index,
            b'"text":%b,"logprobs":%b,"finish_reason":null' % (orjson.dumps(text), shown),
        )

    def finish(self, index: int, reason: str) -> bytes:
        return self._writer.choice(
            index, b'"text":"","logprobs":null,"finish_reason":"%b"' % reason.encode()
        )

    def count(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        self._writer.count(num_prompt_tokens, num_output_tokens)

    def closing(self, fields: dict[str, Any]) -> bytes:
        return self._writer.closing(fields)

    def whole(self, choices: Sequence[ChoiceText], fields: dict[str, Any]) -> bytes:
        shown = [
            {
                "index": index,
                "text": choice.text,
                "logprobs": None
                if choice.logprobs is None
                else _text_logprobs(choice.logprobs, self._logprobs or 0),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return orjson.dumps({**_fields(self._head, "text_completion"), "choices": shown, **fields})


def usage_of(num_prompt_tokens: int, num_output_tokens: int, num_cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def _fields(head: Head, kind: str) -> dict[str, Any]:
    return {"id": head.id, "object": kind, "created": head.created, "model": head.model}


def _chat_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {
        "content": [
            {
                **_chat_token(entry.data, entry.logprob),
                "top_logprobs": [_chat_token(data, logprob) for data, logprob in entry.top],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _chat_token(data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _readable(data, ""), "logprob": logprob, "bytes": list(data)}


def _text_logprobs(entries: Sequence[TokenLogprob], top: int) -> dict[str, Any]:
    """The older shape; the chosen token is always among its alternatives."""
    alternatives = [_alternatives(entry) for entry in entries] if top else None
    return {
        "tokens": [_readable(entry.data, "bytes:") for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": alternatives,
        "text_offset": [entry.text_offset for entry in entries],
    }


def _alternatives(entry: TokenLogprob) -> dict[str, float]:
    found = {_readable(data, "bytes:"): logprob for data, logprob in entry.top}
    found.setdefault(_readable(entry.data, "bytes:"), entry.logprob)
    return found


def _readable(data: bytes, mark: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return mark + "".join(f"\\x{byte:02x}" for byte in data)
