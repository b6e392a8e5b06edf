"""Folds ended requests into a window: every one's figures, and the phases of as many as is cheap.

Making a timeline costs some hundred microseconds, so at most `phases_per_s` requests a second
get theirs folded; below that rate all do. Times are passed in.
"""

from baton.cluster.ledger import Ledger
from baton.cluster.ledger.causes import misses
from baton.cluster.reports.group import key_of
from baton.cluster.reports.window import Window

PHASES_PER_S = 5.0
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
    def __init__(self, window: Window, phases_per_s: float = PHASES_PER_S) -> None:
        self.window = window
        self._baselines = Baselines()
        self._rate = phases_per_s
        self._tokens = phases_per_s
        self._filled_at = 0.0

    def add(self, ledger: Ledger, now: float) -> bool:
        """Whether its phases were folded too; `now` in Unix seconds."""
        group = self.window.group(key_of(ledger), now)
        group.add(ledger)
        if not self._may_fold(now):
            return False
        self._baselines.note(ledger)
        self.explain(ledger)
        group.add_phases(ledger, ledger.misses or ())
        return True

    def explain(self, ledger: Ledger) -> None:
        """Sets `ledger.misses` if nobody has."""
        if ledger.misses is None:
            ledger.misses = misses(ledger, self._baselines.alone_step_s)

    def _may_fold(self, now: float) -> bool:
        passed = max(now - self._filled_at, 0.0)
        self._tokens = min(self._rate, self._tokens + passed * self._rate)
        self._filled_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
