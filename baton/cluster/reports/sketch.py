"""A quantile sketch that merges: DDSketch (Masson et al., VLDB 2019), at most 1,024 bins.

Quantiles are within 1 % of a value that was seen; count, sum, least and largest are exact. The
library keeps rows of bins, empty ones too, so the first few values wait for it one by one.
"""

from typing import Any, Self

from ddsketch import LogCollapsingLowestDenseDDSketch
from ddsketch.pb.proto import DDSketchProto, KeyMappingProto

ACCURACY = 0.01
MAX_BINS = 1024
PERCENTS = (50, 90, 95, 99)
_FEW = 32


class Sketch:
    """Of values that are not negative."""

    __slots__ = ("_few", "_many", "least", "most", "sum")

    def __init__(self) -> None:
        self._few: list[tuple[float, float]] = []
        """Values and how often they came, while they are few; then they are in `_many`."""
        self._many: LogCollapsingLowestDenseDDSketch | None = None
        self.sum = 0.0
        self.least = float("inf")
        self.most = float("-inf")

    @property
    def count(self) -> float:
        many = self._many.count if self._many is not None else 0
        return float(many + sum(times for _, times in self._few))

    def add(self, value: float) -> None:
        self._put(value, 1)
        self.sum += value
        self.least = min(self.least, value)
        self.most = max(self.most, value)

    def merge(self, other: "Sketch") -> None:
        if other._many is not None:
            self._binned().merge(other._many)
        for value, times in other._few:
            self._put(value, times)
        self.sum += other.sum
        self.least = min(self.least, other.least)
        self.most = max(self.most, other.most)

    def quantile(self, share: float) -> float:
        """Raises ValueError when nothing was added."""
        return self._quantiles(share)[0]

    def figures(self, factor: float = 1.0) -> dict[str, float]:
        """Count, mean, extremes and percentiles, times `factor`."""
        if not self.count:
            return {"count": 0}
        found = self._quantiles(*(percent / 100 for percent in PERCENTS))
        shown = {f"p{percent}": value for percent, value in zip(PERCENTS, found, strict=True)}
        shown |= {"mean": self.sum / self.count, "min": self.least, "max": self.most}
        return {"count": self.count, **{name: value * factor for name, value in shown.items()}}

    def as_json(self) -> dict[str, Any]:
        """`bins`: [a value inside, how many] of every bin that is not empty, ascending; of few
        values each value."""
        zeros, bins = self._bins()
        return {
            "zeros": zeros,
            "bins": bins,
            "sum": self.sum,
            "min": self.least if self.count else None,
            "max": self.most if self.count else None,
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Self:
        made = cls()
        for value, count in [(0.0, raw["zeros"]), *raw["bins"]]:
            if count:
                made._put(value, count)
        if made.count:
            made.sum, made.least, made.most = raw["sum"], raw["min"], raw["max"]
        return made

    def _quantiles(self, *shares: float) -> list[float]:
        whole = self._all()
        if not whole.count:
            raise ValueError("an empty sketch has no quantiles")
        values = (whole.get_quantile_value(share) or 0.0 for share in shares)
        return [min(max(value, self.least), self.most) for value in values]

    def _bins(self) -> tuple[float, list[tuple[float, float]]]:
        """How many zeros, and the rest."""
        if self._many is None:
            zeros = float(sum(times for value, times in self._few if value == 0))
            return zeros, sorted((value, times) for value, times in self._few if value)
        proto = DDSketchProto.to_proto(self._many)
        store, mapping = proto.positiveValues, KeyMappingProto.from_proto(proto.mapping)
        counts = enumerate(store.contiguousBinCounts, int(store.contiguousBinIndexOffset))
        return proto.zeroCount, [(mapping.value(index), count) for index, count in counts if count]

    def _put(self, value: float, times: float) -> None:
        if self._many is None and len(self._few) < _FEW:
            self._few.append((value, times))
        else:
            self._binned().add(value, times)

    def _binned(self) -> LogCollapsingLowestDenseDDSketch:
        if self._many is None:
            self._many, self._few = self._all(), []
        return self._many

    def _all(self) -> LogCollapsingLowestDenseDDSketch:
        if self._many is not None:
            return self._many
        made = LogCollapsingLowestDenseDDSketch(ACCURACY, bin_limit=MAX_BINS)
        for value, times in self._few:
            made.add(value, times)
        return made
