"""What things will take, learned from what they took. Pure: no I/O, no clock, no torch."""

from router.predictor.predictor import Phase, Predictor

__all__ = ["Phase", "Predictor"]
