"""Drafts whose number does not depend on how busy the machine is."""

import random
from collections.abc import Sequence as ListOf

from baton.engine.speculation.drafting import Drafting
from baton.engine.speculation.estimates import StepTimes
from baton.engine.speculation.lookup import Lookup


class Free(StepTimes):
    """Every step takes the same time, so every draft pays."""

    def knows(self, num_tokens: int) -> bool:
        return True

    def expected(self, num_tokens: int) -> float:
        return 1.0


class Foresight:
    """Knows how texts go on, and is wrong now and then."""

    def __init__(self, seed: int = 0, wrong: float = 0.2) -> None:
        self.texts: list[list[int]] = []
        self._rng = random.Random(seed)
        self._wrong = wrong

    def propose(self, token_ids: ListOf[int], count: int) -> list[int]:
        tokens, size = list(token_ids), len(token_ids)
        known = next((text for text in self.texts if text[:size] == tokens), tokens)
        draft = known[size : size + self._rng.randint(0, count)]
        return [t if self._rng.random() >= self._wrong else (t + 1) % 97 for t in draft]


def foreseeing(foresight: Foresight, longest: int = 6) -> Drafting:
    return Drafting(lambda: foresight, longest, Free())


def looking_up(match: int = 2, longest: int = 8) -> Drafting:
    return Drafting(lambda: Lookup(match), longest, Free())
