"""Folds ended requests into a window: every one's figures, and the phases of as many as is cheap.

Making a timeline costs time that grows with the tokens of its request, so folding may take `share`
of one core and is skipped while it has taken more; at low rates all are folded.
"""

import time
from collections.abc import Callable

from baton.cluster.ledger import Ledger
from baton.cluster.ledger.causes import misses
from baton.cluster.reports.group import Group, key_of
from baton.cluster.reports.window import Window

SHARE = 0.003
# What is saved up while nothing is to be folded, in seconds.
SAVED_S = 10.0
MAX_WORKERS = 1000


class Baselines:
    """Mean decode step of each worker in the smallest batch seen there."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, float, int]] = {}

    def note(self, ledger: Ledger) -> None:
        for call in ledger.calls:
            if call.role != "decode" or len(self._seen) >= MAX_WORKERS:
                continue
            for start, end, batch_size, num_tokens, _, drafted in call.steps_by_row():
                smallest, total, count = self._seen.get(call.where, (batch_size, 0.0, 0))
                if num_tokens != 1 or drafted or batch_size > smallest:
                    continue
                if batch_size < smallest:
                    total, count = 0.0, 0
                self._seen[call.where] = batch_size, total + end - start, count + 1

    def alone_step_s(self, worker: str) -> float | None:
        seen = self._seen.get(worker)
        return None if seen is None else seen[1] / seen[2]


class Collector:
    def __init__(
        self,
        window: Window,
        also: Callable[[Ledger], None] = lambda ledger: None,
        share: float = SHARE,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`also` is called with each ledger that is folded; `clock` says what that took, in s."""
        self.window = window
        self._also = also
        self._share = share
        self._clock = clock
        self._baselines = Baselines()
        self._left_s = share * SAVED_S
        self._filled_at = 0.0

    def add(self, ledger: Ledger, now: float) -> None:
        """`now` in Unix seconds."""
        group = self.window.group(key_of(ledger), now)
        group.add(ledger)
        earned = max(now - self._filled_at, 0.0) * self._share
        self._left_s = min(self._left_s + earned, self._share * SAVED_S)
        self._filled_at = now
        if self._left_s > 0:
            began = self._clock()
            self._fold(ledger, group)
            self._left_s -= self._clock() - began

    def _fold(self, ledger: Ledger, group: Group) -> None:
        self._baselines.note(ledger)
        self.explain(ledger)
        group.add_phases(ledger, ledger.misses or ())
        self._also(ledger)

    def explain(self, ledger: Ledger) -> None:
        """Sets `ledger.misses` if nobody has."""
        if ledger.misses is None:
            ledger.misses = misses(ledger, self._baselines.alone_step_s)
