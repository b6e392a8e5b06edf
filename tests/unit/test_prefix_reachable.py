"""Only blocks whose whole chain is there are shown; what is shown equals what a prompt finds."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.cluster.prefix_index.reachable import Reachable

CHAIN = [bytes([n]) for n in range(1, 6)]


def stored(*chain: bytes) -> list[tuple[bool, bytes, bytes]]:
    return [(True, d, p) for d, p in zip(chain, (b"", *chain), strict=False)]


def removed(*digests: bytes) -> list[tuple[bool, bytes, bytes]]:
    return [(False, digest, b"") for digest in digests]


def test_a_chain_is_shown_parents_first_and_hidden_children_first() -> None:
    blocks = Reachable()
    blocks.apply(stored(*CHAIN))
    assert blocks.take_changes() == (CHAIN, [])
    blocks.apply(removed(CHAIN[0]))
    assert blocks.take_changes() == ([], CHAIN[::-1])


def test_a_block_without_its_ancestors_is_hidden_until_they_are_back() -> None:
    blocks = Reachable()
    blocks.apply(stored(*CHAIN))
    blocks.take_changes()
    blocks.apply(removed(CHAIN[1]))
    assert list(blocks.visible) == CHAIN[:1]
    blocks.take_changes()
    blocks.apply([(True, CHAIN[1], CHAIN[0])])
    assert blocks.take_changes() == (CHAIN[1:], [])


def test_changes_that_cancel_each_other_are_not_told() -> None:
    blocks = Reachable()
    blocks.apply([*stored(*CHAIN), *removed(*CHAIN[3:])])
    assert blocks.take_changes() == (CHAIN[:3], [])
    blocks.apply([*removed(CHAIN[2]), (True, CHAIN[2], CHAIN[1])])
    assert blocks.take_changes() == ([], [])


def test_events_that_come_twice_change_nothing() -> None:
    blocks = Reachable()
    blocks.apply([*stored(*CHAIN), *stored(*CHAIN), *removed(b"unknown")])
    assert blocks.take_changes() == (CHAIN, [])


def test_branches_share_their_beginning() -> None:
    blocks = Reachable()
    blocks.apply([*stored(*CHAIN[:3]), (True, b"x", CHAIN[1]), (True, b"y", b"x")])
    blocks.apply(removed(CHAIN[2]))
    assert set(blocks.visible) == {*CHAIN[:2], b"x", b"y"}
    blocks.apply(removed(b"x"))
    assert set(blocks.visible) == set(CHAIN[:2])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 80))
def test_a_mirror_fed_with_changes_shows_exactly_the_reachable_blocks(
    seed: int, steps: int
) -> None:
    draw, blocks = random.Random(seed), Reachable()
    parent_of = {n: draw.randrange(n) for n in range(1, 20)}  # a random tree; 0 is the root
    held: set[int] = set()
    mirror: set[bytes] = set()
    for _ in range(steps):
        node = draw.randrange(1, 20)
        parent = parent_of[node]
        store = node not in held
        (held.add if store else held.discard)(node)
        blocks.apply([(store, bytes([node]), bytes([parent]) if parent else b"")])
        if draw.random() < 0.3:
            added, gone = blocks.take_changes()
            assert not mirror & set(added) and set(gone) <= mirror
            mirror = (mirror - set(gone)) | set(added)
            assert mirror == {bytes([n]) for n in held if _reaches(n, parent_of, held)}
            assert mirror == set(blocks.visible)


def _reaches(node: int, parent_of: dict[int, int], held: set[int]) -> bool:
    while node:
        if node not in held:
            return False
        node = parent_of[node]
    return True
