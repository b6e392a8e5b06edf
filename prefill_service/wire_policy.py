"""Whether a hand-off is worth encoding, and how long its frames may be. Plain numbers in, a
decision out: no torch, no clock."""

from dataclasses import dataclass

RATE_LIFE_S = 60.0
"""What was measured longer ago says nothing: both ways are tried again."""
LEAST_BYTES = 1 << 20
"""What fewer bytes take is mostly latency."""
FRAME_S = 0.25
"""Of a link's time that one frame may take."""
_WEIGHT = 0.3
"""Of the newest measurement."""


@dataclass(frozen=True)
class Forecast:
    """Of one hand-off. `raw_rate` and `encoded_rate` are bytes on the wire per second, the work of
    both ends included; None when not known."""

    raw_bytes: int
    encoded_bytes: int
    hidden_s: float
    """How long the prompt is still computed while blocks are on their way."""
    raw_rate: float | None = None
    encoded_rate: float | None = None


def worth_encoding(forecast: Forecast) -> bool:
    """When the link, not computation, is what decode would wait for, and encoding is quicker. A
    link that was not measured carries what is exact; encoding is at first taken to cost nothing."""
    if forecast.raw_rate is None:
        return False
    raw_s = forecast.raw_bytes / forecast.raw_rate
    encoded_s = forecast.encoded_bytes / (forecast.encoded_rate or forecast.raw_rate)
    return raw_s > forecast.hidden_s and encoded_s < raw_s


def frame_bytes(most: int, rate: float | None) -> int:
    """What a link of so many bytes per second carries in FRAME_S: whoever waits for an
    acknowledgement then sees progress on a slow link too. A link that was not measured is slow."""
    return min(most, max(LEAST_BYTES, int(FRAME_S * (rate or 0.0))))


class Rates:
    """Smoothed rates by name; `now` is any clock in seconds."""

    def __init__(self) -> None:
        self._rates: dict[str, tuple[float, float]] = {}
        """Rate, and when it was last measured."""

    def saw(self, name: str, amount: float, seconds: float, now: float) -> None:
        if seconds <= 0:
            return
        rate, before = amount / seconds, self.get(name, now)
        smoothed = rate if before is None else before + _WEIGHT * (rate - before)
        self._rates[name] = smoothed, now

    def forget(self, name: str) -> None:
        """What was measured is true no more."""
        self._rates.pop(name, None)

    def get(self, name: str, now: float) -> float | None:
        rate, at = self._rates.get(name, (0.0, float("-inf")))
        return rate if now - at <= RATE_LIFE_S else None


class Busy:
    """Bytes that arrived, and how long any were on their way."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.seconds = 0.0
        self._since: float | None = None

    def begin(self, now: float) -> None:
        """One more begins."""
        self._since = now if self._since is None else self._since

    def add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    def end(self, now: float) -> None:
        """None is on its way."""
        if self._since is not None:
            self.seconds += now - self._since
            self._since = None
