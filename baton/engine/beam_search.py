"""Beam search: which continuations of a prompt's beams live on, which are finished, when it ends.

The search of `transformers` (`GenerationMixin._beam_search`), step for step: of the best
candidates over all beams those that end are finished if they are among the first `width`, the
best others live on; a finished one scores its summed log probability over its length to the
power of `length_penalty`. Plain Python; knows neither blocks nor sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.engine.sampling_params import BeamParams
from baton.engine.sequence import FinishReason, SampledToken


@dataclass(frozen=True)
class Beam:
    """A continuation. `parent` is its place among the beams before the last step."""

    tokens: tuple[SampledToken, ...] = ()
    score: float = 0.0
    """Summed log probability; of a finished beam divided by its length's power."""
    parent: int = 0
    finish_reason: FinishReason | None = None


class BeamSearch:
    """Begins with one beam, the prompt; feed `advance` until `over`."""

    def __init__(self, params: BeamParams, max_tokens: int, stop_ids: set[int]) -> None:
        self._params = params
        self._max_tokens = max_tokens
        self._stop_ids = stop_ids
        self._length = 0
        self.running: list[Beam] = [Beam()]
        self.finished: list[Beam] = []
        """At most `width`, the best first."""
        self.over = False

    @staticmethod
    def num_candidates(width: int, num_stop_ids: int) -> int:
        """Per beam: enough that `width` are left if every stop id takes its share."""
        return max(2, 1 + num_stop_ids) * width

    def advance(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> list[Beam]:
        """One step. `candidates[i]` are the likeliest (token id, log probability) after beam i.
        Returns the beams that live on, best first; their `parent` says from which."""
        self._length += 1
        width = self._params.width
        best = self._best(candidates)
        ended = [beam.finish_reason is not None for beam in best]
        fresh = [beam for beam, end in zip(best[:width], ended, strict=False) if end]
        self.running = [beam for beam, end in zip(best, ended, strict=True) if not end][:width]
        if not (len(self.finished) == width and self._params.early_stopping is True):
            self._finish(fresh)
        self.over = all(ended) or self._cannot_improve()
        return self.running

    def _best(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> list[Beam]:
        ranked = sorted(
            (-(beam.score + logprob), place, token_id, logprob)
            for place, beam in enumerate(self.running)
            for token_id, logprob in candidates[place]
        )
        count = self.num_candidates(self._params.width, len(self._stop_ids))
        return [
            self._extended(place, token_id, logprob)
            for _, place, token_id, logprob in ranked[:count]
        ]

    def _extended(self, place: int, token_id: int, logprob: float) -> Beam:
        parent, reason = self.running[place], None
        if token_id in self._stop_ids:
            reason = FinishReason.STOP
        elif self._length >= self._max_tokens:
            reason = FinishReason.LENGTH
        tokens = (*parent.tokens, SampledToken(token_id, logprob))
        return Beam(tokens, parent.score + logprob, place, reason)

    def _finish(self, beams: Sequence[Beam]) -> None:
        scored = [
            Beam(beam.tokens, self._normalised(beam.score, self._length), 0, beam.finish_reason)
            for beam in beams
        ]
        merged = sorted([*self.finished, *scored], key=lambda beam: -beam.score)
        self.finished = merged[: self._params.width]

    def _cannot_improve(self) -> bool:
        """Whether the finished beams are as many as wanted and no running one will pass them:
        by estimate at the present length, or, for "never", at the length that favours it."""
        if len(self.finished) < self._params.width:
            return False
        if self._params.early_stopping is True or not self.running:
            return True
        length = self._length
        if self._params.early_stopping == "never" and self._params.length_penalty > 0:
            length = self._max_tokens
        return self._normalised(self.running[0].score, length) <= self.finished[-1].score

    def _normalised(self, score: float, length: int) -> float:
        return score / length**self._params.length_penalty
