"""`baton chat`: a conversation with the model over the OpenAI-compatible endpoint.

Owns the history of one conversation and the reading of its event stream. An answer that failed
midway is not kept in the history. Knows nothing of workers.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from baton.cli.local import key_headers
from baton.cluster.errors import BatonError

# No answer for two minutes ends the wait; a long answer may take as long as it needs.
TIMEOUT = httpx.Timeout(120.0, connect=5.0)


@dataclass
class Conversation:
    url: str
    model: str | None = None
    system: str | None = None
    temperature: float = 0.7
    max_tokens: int = 512
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, client: httpx.Client, text: str) -> Iterator[str]:
        """The answer, piece by piece; both sides join the history when it is complete."""
        turn = [*self.messages, {"role": "user", "content": text}]
        pieces = []
        for piece in _stream(client, self._body(client, turn)):
            pieces.append(piece)
            yield piece
        self.messages = [*turn, {"role": "assistant", "content": "".join(pieces)}]

    def _body(self, client: httpx.Client, turn: list[dict[str, str]]) -> dict[str, Any]:
        self.model = self.model or _first_model(client)
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {
            "model": self.model,
            "messages": [*system, *turn],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "stream": True,
        }


def chat(conversation: Conversation, message: str | None) -> None:
    base_url = conversation.url.rstrip("/")
    try:
        with httpx.Client(
            base_url=base_url, headers=key_headers(), timeout=TIMEOUT, trust_env=False
        ) as client:
            if message is not None:
                _print_answer(conversation.ask(client, message))
            else:
                repl(conversation, client, input)
    except httpx.ConnectError as error:
        raise BatonError(
            f"Nothing answers at {conversation.url}; start it with `baton up`, or "
            "name another place with --url."
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise BatonError(f"The connection to {conversation.url} failed: {error}") from error


def repl(conversation: Conversation, client: httpx.Client, read: Callable[[str], str]) -> None:
    """Reads and answers until end of input; Ctrl-C ends an answer, not the conversation."""
    _write("Ctrl-D ends, /new starts over.\n")
    while (text := _read(read)) is not None:
        if text == "/new":
            conversation.messages = []
        elif text:
            _answer_in_repl(conversation, client, text)


def _answer_in_repl(conversation: Conversation, client: httpx.Client, text: str) -> None:
    try:
        _print_answer(conversation.ask(client, text))
    except KeyboardInterrupt:
        _write("\n(ended)\n")
    except BatonError as error:
        _write(f"\n{error}\n")


def _read(read: Callable[[str], str]) -> str | None:
    try:
        return read("> ").strip()
    except (EOFError, KeyboardInterrupt):
        _write("\n")
        return None


def _print_answer(pieces: Iterator[str]) -> None:
    for piece in pieces:
        _write(piece)
    _write("\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _first_model(client: httpx.Client) -> str:
    answer = client.get("/v1/models")
    if answer.status_code != 200:
        raise BatonError(_message(answer))
    return str(answer.json()["data"][0]["id"])


def _stream(client: httpx.Client, body: dict[str, Any]) -> Iterator[str]:
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            answer.read()
            raise BatonError(_message(answer))
        for line in answer.iter_lines():
            event = line.removeprefix("data:").strip()
            if event == "[DONE]":
                return
            if line.startswith("data:"):
                yield _piece(json.loads(event))
    raise BatonError("The answer broke off.")


def _piece(event: dict[str, Any]) -> str:
    if "error" in event:
        raise BatonError(str(event["error"].get("message", event["error"])))
    choices = event.get("choices") or [{}]
    return choices[0].get("delta", {}).get("content") or ""


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"The server answered {answer.status_code}."
