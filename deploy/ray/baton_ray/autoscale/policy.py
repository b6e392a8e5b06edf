"""How many workers a pool should have. Pure: load and time come as arguments, nothing is read.

Load is counted in workers: 1.5 keeps one and a half of them busy. Constant load never makes the
count go up and down again: more are wanted above `high`, sized so that `target` of each is busy,
and one fewer only if the rest would stay below `low`; low < target < high. Where targets are
missed though there is room, one more is tried, and the load at which a count was too little is
remembered: it is not tried again near that load until `memory_s` has passed.
"""

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PoolState:
    """What a pool looks like now. `missed`: share of requests that missed a target, or are
    predicted to, because of this pool."""

    load: float
    missed: float = 0.0


@dataclass(frozen=True)
class Rules:
    high: float = 0.8
    target: float = 0.65
    low: float = 0.5
    tolerated: float = 0.1
    """Share of missed targets that calls for another worker."""
    worth_a_try: float = 0.3
    """Below this load per worker, misses are not for want of workers."""
    clearly_less: float = 0.7
    """Of the load at which a count was too little."""
    up_after_s: float = 4.0
    down_after_s: float = 60.0
    memory_s: float = 1800.0


@dataclass
class PoolPolicy:
    """Decides for one pool of at least `least` and at most `most` workers; starts at `least`."""

    least: int
    most: int
    rules: Rules = field(default_factory=Rules)

    def __post_init__(self) -> None:
        self.wanted = self.least
        self._high_since: float | None = None
        self._low_since: float | None = None
        self._too_few: dict[int, tuple[float, float]] = {}

    def decide(self, now: float, state: PoolState) -> int:
        """The wanted count. `now`: seconds of a monotonic clock; workers that are still starting
        count as if they served."""
        more, fewer = self._more(state), self._fewer(now, state)
        self._high_since = _since(self._high_since, now, more > self.wanted)
        self._low_since = _since(self._low_since, now, fewer < self.wanted)
        if _lasted(self._high_since, now, self.rules.up_after_s):
            self._learn(now, state.load)
            self._set(more)
        elif _lasted(self._low_since, now, self.rules.down_after_s):
            self._set(fewer)
        return self.wanted

    def _more(self, state: PoolState) -> int:
        share = state.load / max(self.wanted, 1)
        wanted = self.wanted
        if share > self.rules.high or (not self.wanted and state.load > 0):
            wanted = max(math.ceil(state.load / self.rules.target), wanted + 1)
        elif state.missed > self.rules.tolerated and share > self.rules.worth_a_try:
            wanted += 1
        # At most twice as many at once: load that waits is seen as more than it is.
        return min(wanted, max(2 * self.wanted, 1), self.most)

    def _fewer(self, now: float, state: PoolState) -> int:
        left = self.wanted - 1
        idle = state.load < self.rules.low * left or (left == 0 and state.load == 0)
        if left < self.least or not idle or state.missed > self.rules.tolerated:
            return self.wanted
        bound = self._load_too_high_for(left, now)
        return left if state.load < self.rules.clearly_less * bound else self.wanted

    def _learn(self, now: float, load: float) -> None:
        known = self._load_too_high_for(self.wanted, now)
        self._too_few[self.wanted] = (min(load, known), now)

    def _load_too_high_for(self, count: int, now: float) -> float:
        """The least load at which this count, or a greater one, was too little lately."""
        since = now - self.rules.memory_s
        self._too_few = {n: seen for n, seen in self._too_few.items() if seen[1] > since}
        return min((load for n, (load, _) in self._too_few.items() if n >= count), default=math.inf)

    def _set(self, wanted: int) -> None:
        self.wanted = wanted
        self._high_since = self._low_since = None


def _since(since: float | None, now: float, holds: bool) -> float | None:
    """When a condition that holds now began to."""
    return (now if since is None else since) if holds else None


def _lasted(since: float | None, now: float, seconds: float) -> bool:
    return since is not None and now - since >= seconds
