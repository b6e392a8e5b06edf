"""A quantile sketch that merges: DDSketch (Masson et al., VLDB 2019), at most 1,024 bins.

Quantiles are within 1 % of a value that was seen; count, sum, least and largest are exact. Only
bins that are not empty are kept: a slot of 15 s sees a few values of each kind, far apart.
"""

import math
from typing import Any, Self

ACCURACY = 0.01
MAX_BINS = 1024
PERCENTS = (50, 90, 95, 99)

_GROWTH = (1 + ACCURACY) / (1 - ACCURACY)
_LOG_GROWTH = math.log(_GROWTH)


def _bin_of(value: float) -> int:
    return math.ceil(math.log(value) / _LOG_GROWTH)


def _value_in(index: int) -> float:
    """Within `ACCURACY` of every value of the bin."""
    return 2 * math.exp(index * _LOG_GROWTH) / (1 + _GROWTH)


class Sketch:
    """Of values that are not negative."""

    __slots__ = ("_bins", "_zeros", "least", "most", "sum")

    def __init__(self) -> None:
        self._zeros = 0.0
        self._bins: dict[int, float] = {}
        """How many values by bin."""
        self.sum = 0.0
        self.least = float("inf")
        self.most = float("-inf")

    @property
    def count(self) -> float:
        return self._zeros + sum(self._bins.values())

    def add(self, value: float) -> None:
        self._put(value, 1)
        self._collapse()
        self.sum += value
        self.least = min(self.least, value)
        self.most = max(self.most, value)

    def merge(self, other: "Sketch") -> None:
        self._zeros += other._zeros
        for index, count in other._bins.items():
            self._bins[index] = self._bins.get(index, 0) + count
        self._collapse()
        self.sum += other.sum
        self.least = min(self.least, other.least)
        self.most = max(self.most, other.most)

    def quantile(self, share: float) -> float:
        """Raises ValueError when nothing was added."""
        rank, seen = share * (self.count - 1), self._zeros
        if rank < 0:
            raise ValueError("an empty sketch has no quantiles")
        value = 0.0
        for index in sorted(self._bins):
            if seen > rank:
                break
            seen += self._bins[index]
            value = _value_in(index)
        return min(max(value, self.least), self.most)

    def figures(self, factor: float = 1.0) -> dict[str, float]:
        """Count, mean, extremes and percentiles, times `factor`."""
        if not self.count:
            return {"count": 0}
        shown = {f"p{percent}": self.quantile(percent / 100) for percent in PERCENTS}
        shown |= {"mean": self.sum / self.count, "min": self.least, "max": self.most}
        return {"count": self.count, **{name: value * factor for name, value in shown.items()}}

    def as_json(self) -> dict[str, Any]:
        """`bins`: [a value inside, how many] of every bin that is not empty, ascending."""
        return {
            "zeros": self._zeros,
            "bins": [[_value_in(index), count] for index, count in sorted(self._bins.items())],
            "sum": self.sum,
            "min": self.least if self.count else None,
            "max": self.most if self.count else None,
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Self:
        made = cls()
        for value, count in [(0.0, raw["zeros"]), *raw["bins"]]:
            made._put(value, count)
        made._collapse()
        if made.count:
            made.sum, made.least, made.most = raw["sum"], raw["min"], raw["max"]
        return made

    def _put(self, value: float, count: float) -> None:
        if value > 0:
            index = _bin_of(value)
            self._bins[index] = self._bins.get(index, 0) + count
        else:
            self._zeros += count

    def _collapse(self) -> None:
        """The lowest bins become one: what is slow matters."""
        if (excess := len(self._bins) - MAX_BINS) > 0:
            *lowest, first_kept = sorted(self._bins)[: excess + 1]
            self._bins[first_kept] += sum(self._bins.pop(index) for index in lowest)
