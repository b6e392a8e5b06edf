"""Waits between attempts on a Redis that is away: growing, jittered, bounded.

Owns the schedule only. `reset` on success; the next failure starts small again.
"""

import random


class Backoff:
    def __init__(self, first_s: float = 0.1, limit_s: float = 2.0) -> None:
        self._first_s = first_s
        self._limit_s = limit_s
        self._failures = 0

    @property
    def failures(self) -> int:
        """Failures in a row."""
        return self._failures

    def next_s(self) -> float:
        """Counts a failure; between half of and the whole next wait."""
        wait_s = min(self._limit_s, self._first_s * 2 ** min(self._failures, 16))
        self._failures += 1
        return wait_s * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._failures = 0
