"""What things will take, learned from what they took. Pure: no I/O, no clock, no torch."""

from router.predictor.predictor import Phase, Predictor, slowed

__all__ = ["Phase", "Predictor", "slowed"]
