"""What is to be sent: requests as lengths and times, their prompts made only when they are sent.

A prompt is a row of pieces (seed, length); equal pieces at the start of two prompts are equal
tokens, so the prefix structure of a trace survives without its text.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

FIRST_TOKEN_ID = 1000
NUM_TOKEN_IDS = 30_000
# Common words that most tokenizers know as one token, with the space before them.
_WORDS = (
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "number",
    "night",
    "point",
    "home",
)


@dataclass(frozen=True)
class Piece:
    seed: int
    length: int


@dataclass(frozen=True)
class PlannedRequest:
    """`at_s` from the start of the run; closed loops ignore it. `text` is sent as it is."""

    at_s: float
    pieces: tuple[Piece, ...]
    max_tokens: int
    text: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return sum(piece.length for piece in self.pieces)

    def token_ids(self) -> list[int]:
        return [token for piece in self.pieces for token in _ids(piece)]

    def words(self) -> str:
        """About one token a word, for servers that take text only."""
        if self.text is not None:
            return self.text
        return " ".join(_WORDS[token % len(_WORDS)] for token in self.token_ids())


def _ids(piece: Piece) -> list[int]:
    rng = random.Random(piece.seed)
    return [FIRST_TOKEN_ID + rng.randrange(NUM_TOKEN_IDS) for _ in range(piece.length)]


def synthetic(
    times: Sequence[float],
    input_tokens: int,
    output_tokens: int,
    shared_prefix: int = 0,
    spread: float = 0.0,
    seed: int = 0,
) -> list[PlannedRequest]:
    """Random prompts behind a shared prefix; lengths uniform within ± `spread` of the mean, as
    `--random-range-ratio` of vLLM's benchmark."""
    rng = random.Random(seed)
    prefix = (Piece(seed, shared_prefix),) if shared_prefix else ()

    def around(mean: int) -> int:
        low, high = round(mean * (1 - spread)), round(mean * (1 + spread))
        return max(1, rng.randint(low, high))

    return [
        PlannedRequest(
            at, (*prefix, Piece(rng.getrandbits(48), around(input_tokens))), around(output_tokens)
        )
        for at in times
    ]
