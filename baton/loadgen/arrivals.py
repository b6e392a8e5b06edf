"""When requests arrive in an open loop: seconds from the start, for a mean rate. No clock.

Gaps are drawn from a gamma distribution, as in vLLM's benchmark: `burstiness` is its shape, so
1 is a Poisson process, smaller is burstier, infinity is a metronome.
"""

import math
import random
from itertools import accumulate


def arrival_times(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """The first one is at 0. `rate` in requests per second; infinity sends all at once."""
    if count < 1:
        return []
    if math.isinf(rate):
        return [0.0] * count
    if math.isinf(burstiness):
        return [i / rate for i in range(count)]
    rng = random.Random(seed)
    gaps = [rng.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(count - 1)]
    # Stretched to the wanted rate exactly: a short run must not owe its rate to luck.
    drawn = sum(gaps)
    stretch = (count - 1) / rate / drawn if drawn else 1.0
    return [0.0, *(at * stretch for at in accumulate(gaps))]
