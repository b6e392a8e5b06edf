"""The output of a request as text: tokens of the workers in, deltas for the client out.

Owns detokenising, stop strings, logprob entries, finish reasons and the token counts of every
choice. Knows neither HTTP nor gRPC calls. Invariants: joined deltas are the whole text, no
part of a stop string is ever in one, each choice finishes exactly once, and a choice's tokens
come in order without a gap.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.v1 import common_pb2
from router.text import Detokenizer, StopMatcher, StopPatterns, Tokenizer

FINISH_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}


class BrokenSequence(ValueError):
    """A worker sent tokens that do not continue what it sent before."""


# What JSON clients get in place of minus infinity.
LEAST_LOGPROB = -9999.0


@dataclass(frozen=True)
class TokenLogprob:
    """One shown token: its bytes, log probability, alternatives, and where its text begins."""

    data: bytes
    logprob: float
    top: list[tuple[bytes, float]]
    text_offset: int


class Delta(NamedTuple):
    choice: int
    text: str
    logprobs: Sequence[TokenLogprob]
    finish_reason: str | None


class Choice:
    """One choice from its first token to its end."""

    __slots__ = (
        "_decoded",
        "_detokenizer",
        "_emitted",
        "_entries",
        "_index",
        "_min_tokens",
        "_stops",
        "_tokenizer",
        "cumulative_logprob",
        "finish_reason",
        "token_ids",
    )

    def __init__(
        self, index: int, tokenizer: Tokenizer, stops: StopPatterns, min_tokens: int
    ) -> None:
        self._index = index
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer.table)
        self._stops = StopMatcher(stops)
        self._min_tokens = min_tokens
        self._decoded = 0  # characters completed by tokens so far
        self._emitted = 0  # characters already in deltas
        self._entries: deque[tuple[TokenLogprob, int]] = deque()  # with the end of their text
        self.token_ids: list[int] = []
        self.cumulative_logprob = 0.0
        self.finish_reason: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def mean_logprob(self) -> float:
        return self.cumulative_logprob / max(self.num_tokens, 1)

    def push(self, token: common_pb2.Token) -> Delta:
        if token.index != self.num_tokens:
            raise BrokenSequence(
                f"token {token.index} of choice {self._index} came in place of {self.num_tokens}"
            )
        self.token_ids.append(token.token_id)
        finish = FINISH_REASONS.get(token.finish_reason)
        hidden = finish == "stop"  # the token that ends a choice is counted, not shown
        start = self._decoded
        text = "" if hidden else self._detokenizer.push(token.token_id)
        self._decoded += len(text)
        if token.HasField("logprobs"):
            self.cumulative_logprob += token.logprobs.logprob
            if not hidden:
                end = self._decoded + self._detokenizer.pending
                self._entries.append((self._entry(token, start), end))
        if finish:
            text += self._detokenizer.flush()
        shown, matched = self._stops.push(text, self.num_tokens >= self._min_tokens)
        if matched:
            finish = "stop"
        elif finish:
            shown += self._stops.flush()
        self._emitted += len(shown)
        self.finish_reason = finish
        return Delta(self._index, shown, self._released(matched), finish)

    def _released(self, matched: bool) -> Sequence[TokenLogprob]:
        """Entries of tokens whose text is out; after a stop, none that lies wholly behind it."""
        entries, out = self._entries, []
        if not entries:
            return ()
        if matched:
            return [entry for entry, _ in entries if entry.text_offset < self._emitted]
        while entries and (self.finish_reason or entries[0][1] <= self._emitted):
            out.append(entries.popleft()[0])
        return out

    def _entry(self, token: common_pb2.Token, start: int) -> TokenLogprob:
        shown, found = self._tokenizer.shown_bytes, token.logprobs
        top = [
            (shown(token_id), max(logprob, LEAST_LOGPROB))
            for token_id, logprob in zip(found.top_token_ids, found.top_logprobs, strict=True)
        ]
        logprob = max(found.logprob, LEAST_LOGPROB)
        return TokenLogprob(shown(token.token_id), logprob, top, start)


class Generation:
    """All choices of one prompt."""

    def __init__(self, n: int, tokenizer: Tokenizer, stops: StopPatterns, min_tokens: int) -> None:
        self.choices = [Choice(i, tokenizer, stops, min_tokens) for i in range(n)]
        self._open = n
        self.longest = 0
        """Tokens of the choice that has most."""

    @property
    def some_ended(self) -> bool:
        """Whether any of the choices has."""
        return self._open < len(self.choices)

    def unfinished(self, choices: Iterable[int]) -> list[int]:
        return [index for index in choices if self.choices[index].finish_reason is None]

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    def unknown(self, tokens: Iterable[common_pb2.Token]) -> list[common_pb2.Token]:
        """Without the tokens that an earlier attempt has given. Raises BrokenSequence when one
        of them is another token now."""
        fresh = []
        for token in tokens:
            known = self.choices[token.choice].token_ids if token.choice < len(self.choices) else []
            if token.index >= len(known):
                fresh.append(token)
            elif known[token.index] != token.token_id:
                raise BrokenSequence(
                    f"token {token.index} of choice {token.choice} is {token.token_id}, "
                    f"and was {known[token.index]} before"
                )
        return fresh

    def push(self, tokens: Iterable[common_pb2.Token]) -> list[Delta]:
        """Deltas in the order of the tokens; tokens of ended choices are dropped."""
        deltas = []
        for token in tokens:
            if token.choice >= len(self.choices):
                raise BrokenSequence(f"a token of choice {token.choice}, which does not exist")
            choice = self.choices[token.choice]
            if choice.finish_reason is not None:
                continue
            delta = choice.push(token)
            self.longest = max(self.longest, token.index + 1)
            if delta.finish_reason is not None:
                self._open -= 1
            deltas.append(delta)
        return deltas

    def ended_by_text(self, tokens: Iterable[common_pb2.Token]) -> list[int]:
        """Choices among `tokens` that ended here while their worker goes on with them."""
        return [
            token.choice
            for token in tokens
            if not token.finish_reason and self.choices[token.choice].finish_reason is not None
        ]
