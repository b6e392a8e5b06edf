"""One shape for every answer of the HTTP API: chat or text, whole or streamed, checked on the way.

Reading a stream is strict: whatever an OpenAI client relies on is asserted here, so that every
test that streams checks it too.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class ChoiceAnswer:
    """`tokens`: the bytes of each shown token when logprobs were asked for."""

    text: str = ""
    finish_reason: str | None = None
    tokens: list[bytes] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[bytes, float]]] = field(default_factory=list)

    def add_logprobs(self, found: dict[str, Any] | None) -> None:
        if not found:
            return
        if "content" in found:
            for entry in found["content"]:
                self.tokens.append(bytes(entry["bytes"]))
                self.logprobs.append(entry["logprob"])
                self.top.append([(bytes(t["bytes"]), t["logprob"]) for t in entry["top_logprobs"]])
            return
        self.tokens += [_token_bytes(token) for token in found["tokens"]]
        self.logprobs += found["token_logprobs"]
        for alternatives in found["top_logprobs"] or []:
            self.top.append([(_token_bytes(t), value) for t, value in alternatives.items()])


@dataclass
class Answer:
    choices: list[ChoiceAnswer]
    usage: dict[str, Any]

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def texts(self) -> list[str]:
        return [choice.text for choice in self.choices]

    @property
    def tokens(self) -> list[list[bytes]]:
        return [choice.tokens for choice in self.choices]

    @property
    def reasons(self) -> list[str | None]:
        return [choice.finish_reason for choice in self.choices]

    @property
    def counts(self) -> tuple[int, int, int]:
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        prompt, completion, total = (self.usage[name] for name in names)
        return prompt, completion, total

    @property
    def num_cached(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])


def whole_answer(body: dict[str, Any]) -> Answer:
    choices = []
    for index, choice in enumerate(body["choices"]):
        assert choice["index"] == index
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        choices.append(ChoiceAnswer(text, choice["finish_reason"]))
        choices[-1].add_logprobs(choice["logprobs"])
    return Answer(choices, body["usage"])


async def gather_events(response: httpx.Response) -> Answer:
    """Reads a stream with usage to its [DONE]."""
    choices: dict[int, ChoiceAnswer] = {}
    usage: dict[str, Any] | None = None
    done = False
    async for event in events_of(response):
        assert (not done and usage is None) or event == "[DONE]", "something came after the end"
        if event == "[DONE]":
            done = True
        elif not event["choices"]:
            usage = event["usage"]
        else:
            _take(choices, event)
    assert done and usage is not None, "the stream broke off"
    assert sorted(choices) == list(range(len(choices)))
    return Answer([choices[index] for index in sorted(choices)], usage)


async def events_of(response: httpx.Response) -> Any:
    """The events of a stream as JSON, the last one as the string "[DONE]"."""
    async for line in response.aiter_lines():
        if line:
            assert line.startswith("data: "), line
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def _take(choices: dict[int, ChoiceAnswer], event: dict[str, Any]) -> None:
    assert "error" not in event and event["usage"] is None
    (choice,) = event["choices"]
    first = choice["index"] not in choices
    mine = choices.setdefault(choice["index"], ChoiceAnswer())
    assert mine.finish_reason is None, "a chunk after the finish reason"
    if "delta" in choice:
        assert ("role" in choice["delta"]) == first, "the role comes once, and first"
        mine.text += choice["delta"].get("content") or ""
    else:
        mine.text += choice["text"]
    mine.add_logprobs(choice["logprobs"])
    mine.finish_reason = choice["finish_reason"]


def _token_bytes(shown: str) -> bytes:
    """Undoes how text completions show a token that is no whole character."""
    if shown.startswith("bytes:\\x"):
        return bytes.fromhex(shown.removeprefix("bytes:").replace("\\x", ""))
    return shown.encode()
