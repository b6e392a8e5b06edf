"""A target that was missed, as plain data."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Miss:
    """`shares` has the seconds of every cause; `sufficient` when removing `cause` is enough."""

    target: str
    target_s: float
    seen_s: float
    cause: str
    sufficient: bool
    shares: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "target_ms": round(self.target_s * 1e3, 3),
            "seen_ms": round(self.seen_s * 1e3, 3),
            "cause": self.cause,
            "sufficient": self.sufficient,
            "shares_ms": {name: round(s * 1e3, 3) for name, s in self.shares.items()},
        }
