"""Where a prompt's deltas go: gathered for a whole answer, or sent on as chunks.

Both take the same deltas from the same `Generation`, so a streamed answer and a whole one have
the same text, logprobs and counts.
"""

from collections.abc import Awaitable, Sequence

from router.exchange import Exchange
from router.generation import Delta, Generation, TokenLogprob
from router.openai.format import ChoiceText, Format


class Gathered:
    """Keeps everything until the end."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        count = len(generation.choices)
        self._texts: list[list[str]] = [[] for _ in range(count)]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(count)]

    def render(self, deltas: Sequence[Delta]) -> bytes:
        for delta in deltas:
            self._texts[delta.choice].append(delta.text)
            self._logprobs[delta.choice].extend(delta.logprobs)
        return b""

    async def send(self, rendered: bytes) -> None:
        raise AssertionError("a gathered answer has nothing to send before its end")

    def best(self, count: int, echo: str, with_logprobs: bool) -> list[ChoiceText]:
        """All choices, or the `count` with the highest mean log probability per token."""
        choices = self.generation.choices
        order = list(range(len(choices)))
        if count < len(order):
            order.sort(key=lambda i: -choices[i].mean_logprob)
        return [
            ChoiceText(
                echo + "".join(self._texts[i]),
                self._logprobs[i] if with_logprobs else None,
                choices[i].finish_reason,
            )
            for i in order[:count]
        ]


class Streamed:
    """Sends the chunks of one prompt; its choices are numbered from `base`. With `counted`, the
    number of the prompt's tokens, each chunk has the usage so far."""

    def __init__(
        self,
        generation: Generation,
        exchange: Exchange,
        format: Format,
        base: int,
        echo: str,
        counted: int | None,
    ) -> None:
        self.generation = generation
        self._exchange = exchange
        self._format = format
        self._base = base
        self._echo = echo
        self._counted = counted
        self._opened = [False] * len(generation.choices)

    def render(self, deltas: Sequence[Delta]) -> bytes:
        if self._counted is not None:
            self._format.count(self._counted, self.generation.num_tokens)
        return b"".join([self._events(delta) for delta in deltas])

    def send(self, rendered: bytes) -> Awaitable[None]:
        return self._exchange.send_events(rendered)

    def _events(self, delta: Delta) -> bytes:
        index, format = self._base + delta.choice, self._format
        events = b""
        if not self._opened[delta.choice]:
            self._opened[delta.choice] = True
            events = format.opening(index, self._echo)
        if delta.text or delta.logprobs:
            events += format.delta(index, delta.text, delta.logprobs)
        if delta.finish_reason is not None:
            events += format.finish(index, delta.finish_reason)
        return events
