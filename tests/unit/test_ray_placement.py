"""Which workers share a placement group."""

import pytest
from baton_ray.placer import cell_of


@pytest.mark.parametrize(
    ("worker", "prefill", "decode", "cell"),
    [
        ("prefill-0", 1, 1, ("prefill-0", "decode-0")),
        ("decode-1", 2, 2, ("prefill-1", "decode-1")),
        ("decode-1", 1, 3, ("decode-1",)),
        ("prefill-0", 1, 0, ("prefill-0",)),
        ("decode-12", 2, 2, ("decode-12",)),
    ],
)
def test_those_of_the_start_with_one_number_are_a_pair_and_others_stand_alone(
    worker: str, prefill: int, decode: int, cell: tuple[str, ...]
) -> None:
    assert cell_of(worker, prefill, decode) == cell
