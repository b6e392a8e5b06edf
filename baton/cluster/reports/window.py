"""Groups by slot of time: the last hour in slots of 15 s, bounded in memory.

A new group that would be one too many first merges the two oldest slots; so under many tenants
or workers the far past gets coarser and nothing is lost. What is older than the span is dropped.
Only the newest slot is ever written to, so a thread may read the others while requests end.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from baton.cluster.reports.group import Group, Key

SLOT_S = 15.0
SPAN_S = 3600.0
# A group holds some 45 sketches: 16 KB with five values each, 0.3 MB with 75.
MAX_GROUPS = 1000
OTHER = Key("other", "other", "other", "other")


@dataclass
class Slot:
    """`start` and `end` in Unix seconds. `pools`: worker → [sum of used shares, samples, peak]."""

    start: float
    end: float
    groups: dict[Key, Group] = field(default_factory=dict)
    pools: dict[str, list[float]] = field(default_factory=dict)

    def merge(self, other: "Slot") -> None:
        self.start, self.end = min(self.start, other.start), max(self.end, other.end)
        for key, group in other.groups.items():
            self.groups.setdefault(key, Group()).merge(group)
        for worker, (total, samples, peak) in other.pools.items():
            mine = self.pools.setdefault(worker, [0.0, 0.0, 0.0])
            mine[:] = mine[0] + total, mine[1] + samples, max(mine[2], peak)

    def as_json(self) -> dict[str, Any]:
        return {
            "start": self.start,
            "end": self.end,
            "groups": [[list(key), group.as_json()] for key, group in self.groups.items()],
            "pools": self.pools,
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Self:
        groups = {Key(*key): Group.from_json(group) for key, group in raw["groups"]}
        return cls(raw["start"], raw["end"], groups, raw["pools"])


class Window:
    def __init__(
        self, slot_s: float = SLOT_S, span_s: float = SPAN_S, max_groups: int = MAX_GROUPS
    ) -> None:
        self._slot_s = slot_s
        self._span_s = span_s
        self._max_groups = max_groups
        self.slots: list[Slot] = []

    def group(self, key: Key, now: float) -> Group:
        """The group that a request ending at `now` (Unix seconds) is counted in."""
        slot = self._slot(now)
        if key not in slot.groups and self.num_groups >= self._max_groups:
            if len(self.slots) > 1:
                self._merge_oldest()
                slot = self.slots[-1]
            if self.num_groups >= self._max_groups:
                key = OTHER
        return slot.groups.setdefault(key, Group())

    def sample_pools(self, used: Mapping[str, float], now: float) -> None:
        """Shares of the KV pools that are in use at this moment."""
        pools = self._slot(now).pools
        for worker, share in used.items():
            if worker in pools or len(pools) < self._max_groups:
                pool = pools.setdefault(worker, [0.0, 0.0, 0.0])
                pool[:] = pool[0] + share, pool[1] + 1, max(pool[2], share)

    @property
    def num_groups(self) -> int:
        return sum(len(slot.groups) for slot in self.slots)

    def since(self, start: float) -> list[Slot]:
        """Those that end later, for any thread: the newest one is a copy."""
        slots = [slot for slot in self.slots if slot.end > start]
        return [*slots[:-1], *map(_copy, slots[-1:])]

    def _slot(self, now: float) -> Slot:
        if not self.slots or now >= self.slots[-1].end:
            start = now - now % self._slot_s
            self.slots.append(Slot(start, start + self._slot_s))
            oldest = now - self._span_s
            self.slots = [slot for slot in self.slots if slot.end > oldest]
        return self.slots[-1]

    def _merge_oldest(self) -> None:
        first, second, *rest = self.slots
        both = _copy(first)
        both.merge(second)
        self.slots = [both, *rest]


def _copy(slot: Slot) -> Slot:
    made = Slot(slot.start, slot.end)
    made.merge(slot)
    return made


def merged(slots: Iterable[Slot], slot_s: float = SLOT_S) -> list[Slot]:
    """Slots of several routers: those that begin together become one; in order of time."""
    found: dict[float, Slot] = {}
    for slot in slots:
        start = slot.start - slot.start % slot_s
        found.setdefault(start, Slot(slot.start, slot.end)).merge(slot)
    return [found[start] for start in sorted(found)]
