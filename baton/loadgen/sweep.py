"""Finds the knee: the highest rate at which enough requests still meet their targets.

Doubles the rate until attainment falls below the mark, then halves the bracket until it is
narrow. Without targets, a rate is good while the median TTFT stays below twice that of the
first, lightest rate. Plain arithmetic; the caller runs the loads.
"""

from dataclasses import dataclass, field
from typing import Any

WANTED_ATTAINMENT = 0.9
WIDTH = 0.1
TTFT_GROWTH = 2.0


@dataclass
class RateSearch:
    """`next_rate`, run it, `note` its figures, until `next_rate` is None."""

    first_rate: float
    max_steps: int = 10
    tried: list[tuple[float, bool]] = field(default_factory=list)
    _light_ttft_ms: float | None = None

    def next_rate(self) -> float | None:
        if len(self.tried) >= self.max_steps:
            return None
        if not self.tried:
            return self.first_rate
        good, bad = self._bracket()
        if bad is None:
            return 2 * (good or self.first_rate)
        if good is None:
            return bad / 2
        return None if (bad - good) / bad <= WIDTH else (good + bad) / 2

    def note(self, rate: float, figures: dict[str, Any]) -> bool:
        """Whether the rate was good."""
        good = self._is_good(figures)
        self.tried.append((rate, good))
        return good

    @property
    def knee(self) -> float | None:
        """None when every rate was bad."""
        return self._bracket()[0]

    def _is_good(self, figures: dict[str, Any]) -> bool:
        if figures["attainment"] is not None:
            return bool(figures["attainment"] >= WANTED_ATTAINMENT)
        ttft = figures["ttft_ms"]
        if figures["failed"] or ttft is None:
            return False
        if self._light_ttft_ms is None:
            self._light_ttft_ms = ttft["p50"]
        return bool(ttft["p50"] <= TTFT_GROWTH * self._light_ttft_ms)

    def _bracket(self) -> tuple[float | None, float | None]:
        """The highest good rate below the lowest bad one, and that one."""
        bad = min((rate for rate, good in self.tried if not good), default=None)
        good = [rate for rate, ok in self.tried if ok and (bad is None or rate < bad)]
        return max(good, default=None), bad
