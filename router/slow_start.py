"""How much of its capacity a newcomer may be given: its share grows with its age.

A restarted worker has an empty cache and an empty queue, so every policy likes it best, and a burst
would find it cold. As in Envoy's slow start
(https://www.envoyproxy.io/docs/envoy/latest/intro/arch_overview/upstream/load_balancing/slow_start),
it takes part in proportion to its age. Where nobody of its role has been there for longer it takes
part in full, or a whole cluster would start slowly. Pure: the time comes in.
"""

import math
from collections.abc import Sequence

from baton.cluster.workers import WorkerRecord

LEAST_SHARE = 0.2


class SlowStart:
    """`seconds` until a newcomer is like any other; 0 turns it off."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._born: dict[str, float] | None = None
        """By incarnation; of those who were there before us we know nothing and ask nothing."""
        self._shares: dict[str, float] = {}

    def saw(self, workers: Sequence[WorkerRecord], now: float) -> None:
        """The workers that live now."""
        known, stranger = (self._born, now) if self._born is not None else ({}, -math.inf)
        self._born = {w.incarnation: known.get(w.incarnation, stranger) for w in workers}
        ages = {incarnation: now - born for incarnation, born in self._born.items()}
        settled = {w.role for w in workers if ages[w.incarnation] >= self._seconds}
        self._shares = {
            w.incarnation: max(LEAST_SHARE, ages[w.incarnation] / self._seconds)
            for w in workers
            if w.role in settled and ages[w.incarnation] < self._seconds
        }

    def share(self, worker: WorkerRecord) -> float:
        """Of its capacity, at the time when workers were last seen."""
        return self._shares.get(worker.incarnation, 1.0)
