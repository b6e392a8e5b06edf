"""How the next token of a sequence is drawn. Plain data; checked where requests enter.

The draw of a token depends on (seed, choice, position) alone, so a split over workers,
batch-mates, preemption and forks do not change it.
"""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class BeamParams:
    """`early_stopping`: True ends when `width` beams are finished, False when no running one is
    expected to pass them, "never" when none can. Terms of `transformers`' GenerationConfig."""

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


@dataclass(frozen=True)
class SamplingParams:
    """Field meanings as in `proto/baton/v1/common.proto`; `logprobs=None` reports none."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    beam: BeamParams | None = None
    """Beam search instead of draws: the `n` best of its beams, all at its end."""

    @property
    def num_drawn(self) -> int:
        """Sequences that grow side by side from one prompt."""
        return self.n if self.beam is None else self.beam.width

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5
