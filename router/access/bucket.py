"""A token bucket that may be overdrawn: what a request costs is known only when it has ended.

Holds one minute's worth and fills evenly. A request waits until its estimate is there (or the
bucket is full, for one that is larger than a minute's worth), and pays the rest afterwards; a
debt keeps the next ones waiting. Pure: the time is passed in.

Source: https://en.wikipedia.org/wiki/Token_bucket
"""

MINUTE_S = 60.0


class Bucket:
    """Starts full."""

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._filled_at = 0.0

    def wait_s(self, cost: float, now: float) -> float:
        """Seconds until `cost` may be taken; 0 when it may be now."""
        self._fill(now)
        missing = min(cost, self.per_minute) - self._level
        return max(0.0, missing) * MINUTE_S / self.per_minute

    def pay(self, cost: float, now: float) -> None:
        """Whatever the level is; a cost below 0 is given back."""
        self._fill(now)
        self._level -= cost

    def _fill(self, now: float) -> None:
        gained = (now - self._filled_at) * self.per_minute / MINUTE_S
        self._level = min(float(self.per_minute), self._level + max(0.0, gained))
        self._filled_at = now
