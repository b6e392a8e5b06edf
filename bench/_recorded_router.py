"""A router that writes down every sample that its predictor judges itself by.

    python bench/_recorded_router.py FILE FLAGS

FILE gets one JSON object a line; FLAGS are the router's.
"""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import orjson
from _common import Report  # first: it makes way for the router's package

import router.predictor.predictor
from baton.cluster.settings import RouterSettings, load_or_exit
from router.__main__ import main
from router.predictor.least_squares import OnlineLeastSquares

__all__ = ["Report"]


class Recorded(OnlineLeastSquares):
    """`model` tells models apart, the number of costs their phase."""

    samples: IO[bytes]
    _numbers = itertools.count()

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._number = next(self._numbers)

    def _judge(self, x: Sequence[float], y: float) -> float:
        sample = {"model": self._number, "x": x, "y": y, "predicted": self.predict(x)}
        self.samples.write(orjson.dumps(sample) + b"\n")
        return super()._judge(x, y)


if __name__ == "__main__":
    settings = load_or_exit(RouterSettings, sys.argv[2:], "router")
    router.predictor.predictor.OnlineLeastSquares = Recorded  # type: ignore[misc]
    with Path(sys.argv[1]).open("wb", buffering=0) as Recorded.samples:
        code = main(settings)
    sys.exit(code)
