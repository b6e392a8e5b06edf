"""Online least squares for durations: old samples fade, outliers are clipped, no cost is negative.

Minimises the squared *relative* error, since a millisecond matters in a short step and not in
a long one. Keeps decayed normal equations and solves them by coordinate descent from the last
solution (non-negative least squares as in Franc, Hlaváč and Navara, "Sequential Coordinate-wise
Algorithm for Non-negative Least Squares", CAIP 2005); samples beyond a few typical errors
count less (Huber, 1964). Pure: no clock.
"""

from collections import deque
from collections.abc import Sequence
from operator import mul

FORGETTING = 0.97  # a sample counts half after 23 others
CLIP = 3.0  # typical errors beyond which a sample counts less
LEAST_SCALE = 0.02
DRIFT = 4  # so many outliers in a row to one side are the new truth
DRIFT_FORGETTING = 0.7
SWEEPS = 30
TOLERANCE = 1e-4
# Weight of the seeds among so many samples in memory: what is not seen now stays as measured.
SEED_WEIGHT = 0.02
WINDOW = 200


class OnlineLeastSquares:
    """y ≈ w·x with w ≥ 0. `errors`: relative errors of the last predictions, made before the
    sample was learned. `trained`: whether anything has been learned."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._gram = [[0.0] * size for _ in range(size)]
        self._moment = [0.0] * size
        self._seed_gram = [[0.0] * size for _ in range(size)]
        self._seed_moment = [0.0] * size
        self._weights = [0.0] * size
        self._scale = 0.1
        self._streak = 0
        self.trained = False
        self._stale = False
        self.errors: deque[float] = deque(maxlen=WINDOW)

    @property
    def mape(self) -> float | None:
        """Mean relative error of the last predictions; None before the first."""
        return sum(self.errors) / len(self.errors) if self.errors else None

    def predict(self, x: Sequence[float]) -> float:
        if self._stale:
            self._solve()
        return sum(map(mul, self._weights, x))

    def seed(self, samples: Sequence[tuple[Sequence[float], float]]) -> None:
        """Measurements that never fade altogether. In place of earlier seeds."""
        self._seed_gram = [[0.0] * self._size for _ in range(self._size)]
        self._seed_moment = [0.0] * self._size
        for x, y in samples:
            if y > 0:
                self._accumulate(self._seed_gram, self._seed_moment, [v / y for v in x], 1.0)
                self.trained = True
        self._stale = True

    def learn(self, x: Sequence[float], y: float, judge: bool = True) -> None:
        """Takes one sample; samples without a duration teach nothing. `judge`: compare it with
        the prediction first, book the error and clip an outlier."""
        if y <= 0:
            return
        weight = self._judge(x, y) if judge and self.trained else 1.0
        self.trained = True
        keep = DRIFT_FORGETTING if abs(self._streak) >= DRIFT else FORGETTING
        self._gram = [[value * keep for value in row] for row in self._gram]
        self._moment = [value * keep for value in self._moment]
        self._accumulate(self._gram, self._moment, [value / y for value in x], weight)
        self._stale = True

    def _judge(self, x: Sequence[float], y: float) -> float:
        """Books the error of a prediction; the weight that the sample deserves."""
        miss = (y - self.predict(x)) / y
        error, limit = abs(miss), CLIP * self._scale
        self.errors.append(error)
        self._scale += 0.05 * (min(error, limit) - self._scale)
        self._scale = max(self._scale, LEAST_SCALE)
        if error <= limit:
            self._streak = 0
            return 1.0
        same_side = (self._streak > 0) == (miss > 0)
        self._streak = (self._streak if same_side else 0) + (1 if miss > 0 else -1)
        return 1.0 if abs(self._streak) >= DRIFT else limit / error

    @staticmethod
    def _accumulate(
        gram: list[list[float]], moment: list[float], x: Sequence[float], weight: float
    ) -> None:
        for i, value in enumerate(x):
            if value:
                row, scaled = gram[i], weight * value
                moment[i] += scaled  # y is 1 after the division
                for j, other in enumerate(x):
                    row[j] += scaled * other

    def _solve(self) -> None:
        self._stale = False
        size, w = self._size, self._weights
        gram = [
            [a + SEED_WEIGHT * b for a, b in zip(*rows, strict=True)]
            for rows in zip(self._gram, self._seed_gram, strict=True)
        ]
        moment = [a + SEED_WEIGHT * b for a, b in zip(self._moment, self._seed_moment, strict=True)]
        for _ in range(SWEEPS):
            change = 0.0
            for i in range(size):
                row = gram[i]
                if row[i] <= 0.0:
                    continue
                rest = moment[i]
                for j in range(size):
                    rest -= row[j] * w[j]
                new = max(0.0, w[i] + rest / row[i])
                change = max(change, abs(new - w[i]) / (new + w[i] + 1e-12))
                w[i] = new
            if change < TOLERANCE:
                return
