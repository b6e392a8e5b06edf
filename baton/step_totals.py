"""What a run of engine steps computed, and how long it took: what latency is predicted from.

Plain sums, so totals of steps add up; a duration that is linear in them can be learned from
any mixture of steps. Knows neither engine nor network; both sides use it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTotals:
    """`attended_tokens` sums, over the prompt tokens computed, the context that each looks at;
    `context_tokens` the same over the decoded ones."""

    steps: int = 0
    prefill_tokens: int = 0
    attended_tokens: int = 0
    decode_tokens: int = 0
    context_tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: "StepTotals") -> "StepTotals":
        return StepTotals(
            self.steps + other.steps,
            self.prefill_tokens + other.prefill_tokens,
            self.attended_tokens + other.attended_tokens,
            self.decode_tokens + other.decode_tokens,
            self.context_tokens + other.context_tokens,
            self.seconds + other.seconds,
        )


def chunk_attention(start: int, count: int) -> int:
    """Context that `count` prompt tokens after the first `start` look at, each itself included."""
    return count * start + count * (count + 1) // 2
