"""How well a predictor's linear model could have done: the least mean relative error of one that is
fitted to the same samples afterwards. What is left is noise to it, whatever learns it.
"""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import orjson
from numpy.typing import NDArray

ROUNDS = 100
LEAST_MISS = 1e-3
Samples = dict[int, list[tuple[list[float], float]]]


def read_samples(path: Path) -> dict[int, Samples]:
    """What `_recorded_router.py` wrote: by number of costs, by model, costs and seconds."""
    found: dict[int, Samples] = defaultdict(lambda: defaultdict(list))
    for line in path.read_bytes().splitlines():
        sample = orjson.loads(line)
        found[len(sample["x"])][sample["model"]].append((sample["x"], sample["y"]))
    return found


def least_mape(samples: Samples) -> float:
    """Over all models, each fitted by itself."""
    misses = [miss for model in samples.values() for miss in _misses(model)]
    return float(np.mean(misses))


def _misses(samples: Iterable[tuple[list[float], float]]) -> NDArray[np.float64]:
    """Relative errors of non-negative weights that make their mean least, by reweighted least
    squares (Schlossmacher, 1973)."""
    relative = np.array([[value / y for value in x] for x, y in samples])
    relative /= np.maximum(relative.max(axis=0), 1e-300)
    best = misses = np.abs(1.0 - relative @ _fit(relative, np.ones(len(relative))))
    for _ in range(ROUNDS):
        weights = _fit(relative, 1.0 / np.maximum(misses, LEAST_MISS))
        misses = np.abs(1.0 - relative @ weights)
        best = min(best, misses, key=np.sum)
    return best


def _fit(x: NDArray[np.float64], importance: NDArray[np.float64]) -> NDArray[np.float64]:
    """w >= 0 that makes 1 - x·w least, squared: by coordinates, as the predictor does it."""
    gram, moment = (x.T * importance) @ x, x.T @ importance
    weights = np.zeros(len(moment))
    for _ in range(300):
        for i, row in enumerate(gram):
            if row[i] > 0.0:
                weights[i] = max(0.0, weights[i] + (moment[i] - row @ weights) / row[i])
    return weights
