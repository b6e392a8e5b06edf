"""What drafts are judged by: how often they are right, and what a step of more tokens takes."""

import statistics
from collections import deque


class Acceptance:
    """Share of drafted tokens that were right. The last `memory` tries count; before there are
    any, `prior` counts as two of them."""

    def __init__(self, prior: float, memory: int) -> None:
        self._right, self._tries = 2 * prior, 2.0
        self._keep = 1 - 1 / memory

    @property
    def share(self) -> float:
        return self._right / self._tries

    def note(self, right: int, tries: int) -> None:
        keep = self._keep**tries
        self._right = self._right * keep + right
        self._tries = self._tries * keep + tries


class StepTimes:
    """Seconds of a step by its number of tokens: the median of the latest few of about that
    size. What has not been seen for `_STALE` steps is forgotten, so that it is tried again."""

    _LATEST = 5
    _STALE = 256

    def __init__(self) -> None:
        self._steps = 0
        self._latest: dict[int, deque[float]] = {}
        self._seen_at: dict[int, int] = {}

    def note(self, num_tokens: int, seconds: float) -> None:
        self._steps += 1
        size = _about(num_tokens)
        self._latest.setdefault(size, deque(maxlen=self._LATEST)).append(seconds)
        self._seen_at[size] = self._steps
        for old in [s for s, at in self._seen_at.items() if self._steps - at > self._STALE]:
            del self._latest[old], self._seen_at[old]

    def knows(self, num_tokens: int) -> bool:
        return _about(num_tokens) in self._latest

    def expected(self, num_tokens: int) -> float:
        """Between known sizes in proportion; beyond them as the nearest: what might be cheap is
        tried. There must be a known one."""
        size = _about(num_tokens)
        below = max((s for s in self._latest if s <= size), default=None)
        above = min((s for s in self._latest if s >= size), default=None)
        if below is None or above is None or below == above:
            return self._median(below if below is not None else above)
        share = (size - below) / (above - below)
        return self._median(below) * (1 - share) + self._median(above) * share

    def _median(self, size: int | None) -> float:
        assert size is not None, "no step has been timed"
        return statistics.median(self._latest[size])


def _about(num_tokens: int) -> int:
    """Exact below 16, then in eighths of an octave."""
    unit = 1 << max(0, num_tokens.bit_length() - 4)
    return num_tokens // unit * unit
