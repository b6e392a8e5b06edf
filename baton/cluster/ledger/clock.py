"""How far another process's clock is ahead of ours, from the messages of one call.

A message cannot arrive before it was sent, so each one bounds the offset from one side; the
estimate is the middle of what is left and the error half of its width (Cristian 1989, as in
NTP, RFC 5905 §8, but over every message of a stream). No clock is read here.
"""

import math


class ClockOffset:
    """Bounds on (their clock - our clock), in seconds."""

    __slots__ = ("high", "low")

    def __init__(self) -> None:
        self.low = -math.inf
        self.high = math.inf

    def sent(self, ours: float, theirs: float) -> None:
        """A message left here at `ours` and had reached them at `theirs`."""
        self.high = min(self.high, theirs - ours)

    def received(self, theirs: float, ours: float) -> None:
        """A message left them not before `theirs` and reached us at `ours`."""
        self.low = max(self.low, theirs - ours)

    @property
    def known(self) -> bool:
        """Some message was heard, so their times can be placed."""
        return self.low > -math.inf

    @property
    def offset(self) -> float:
        """Never puts a message's arrival before its departure, unless the bounds contradict."""
        return self.low if math.isinf(self.high) else (self.low + self.high) / 2

    @property
    def error(self) -> float | None:
        """Half the width; None when only one side is bounded."""
        return None if math.isinf(self.high) else max(self.high - self.low, 0.0) / 2
