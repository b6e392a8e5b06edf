"""Ownership of blocks: conserved, shared, evicted in order, promised."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.block_hash import block_hashes, root_hash
from baton.engine.block_manager import BlockManager, NoFreeBlocks


def hashes(count: int, salt: str = "") -> list[bytes]:
    return block_hashes(root_hash("model", cache_salt=salt), list(range(count * 4)), 4)


def test_a_hash_is_the_same_in_every_process() -> None:
    assert block_hashes(root_hash("m"), [1, 2, 3, 4], 2)[1].hex() == (
        "4dfd28bffb43a5d87d40a1e9840ccafb"
    )


def test_a_hash_covers_everything_before_its_block_and_the_identity_of_the_cache() -> None:
    plain = block_hashes(root_hash("m"), [1, 2, 3, 4], 2)
    assert plain[1] != block_hashes(root_hash("m"), [9, 2, 3, 4], 2)[1]
    roots = {
        root_hash("m"),
        root_hash("m2"),
        root_hash("m", "window"),
        root_hash("m", cache_salt="a"),
        root_hash("m", "full", "a "),
        root_hash("ma"),
        root_hash("", "mfull"),
    }
    assert len(roots) == 7


def test_released_blocks_with_a_hash_are_found_until_they_are_evicted() -> None:
    blocks = BlockManager(4, 4)
    table = blocks.allocate(3)
    for block, digest in zip(table, hashes(3), strict=True):
        blocks.publish(block, digest)
    blocks.release(table)
    assert blocks.match_prefix(hashes(3)) == table and blocks.num_free == 4
    blocks.allocate(2)  # the free block, then the least useful cached one: the prefix's end
    assert blocks.match_prefix(hashes(3)) == table[:2]
    blocks.check_integrity()


def test_a_block_in_use_is_never_evicted() -> None:
    blocks = BlockManager(2, 4)
    (kept,) = blocks.allocate(1)
    blocks.publish(kept, hashes(1)[0])
    blocks.release([kept])
    blocks.acquire([kept])
    blocks.allocate(1)
    with pytest.raises(NoFreeBlocks):
        blocks.allocate(1)
    assert blocks.match_prefix(hashes(1)) == [kept]


def test_the_first_block_with_a_hash_keeps_it_and_a_twin_is_simply_freed() -> None:
    blocks = BlockManager(2, 4)
    first, twin = blocks.allocate(2)
    blocks.publish(first, hashes(1)[0])
    blocks.publish(twin, hashes(1)[0])
    blocks.release([twin])
    assert blocks.num_cached == 0
    blocks.release([first])
    assert blocks.num_cached == 1 and blocks.match_prefix(hashes(1)) == [first]
    blocks.check_integrity([])


def test_a_promise_keeps_blocks_back_without_naming_them() -> None:
    blocks = BlockManager(4, 4)
    blocks.promise(3)
    assert blocks.num_available == 1
    with pytest.raises(NoFreeBlocks, match="2 blocks asked for, 1 available"):
        blocks.allocate(2)
    with pytest.raises(NoFreeBlocks):
        blocks.promise(2)
    blocks.withdraw_promise(3)
    assert len(blocks.allocate(4)) == 4
    with pytest.raises(ValueError, match="promised"):
        blocks.withdraw_promise(1)


def test_acquiring_cached_blocks_counts_against_promises() -> None:
    """A pinned cached block is no longer evictable, so it cannot also back a promise."""
    blocks = BlockManager(2, 4)
    table = blocks.allocate(2)
    for block, digest in zip(table, hashes(2), strict=True):
        blocks.publish(block, digest)
    blocks.release(table)
    blocks.promise(1)
    assert blocks.can_take(0, table[:1])
    assert not blocks.can_take(1, table[:1])
    assert not blocks.can_take(0, table)


def test_releasing_a_block_nobody_holds_is_an_error() -> None:
    blocks = BlockManager(2, 4)
    table = blocks.allocate(1)
    blocks.release(table)
    with pytest.raises(ValueError, match="held by nobody"):
        blocks.release(table)


def test_flush_forgets_the_cache_and_keeps_what_is_held() -> None:
    blocks = BlockManager(3, 4)
    table = blocks.allocate(2)
    for block, digest in zip(table, hashes(2), strict=True):
        blocks.publish(block, digest)
    blocks.release(table[1:])
    blocks.flush()
    assert blocks.match_prefix(hashes(2)) == [] and blocks.num_cached == 0
    blocks.check_integrity([table[:1]])


def test_check_integrity_notices_a_lost_and_a_doubly_owned_block() -> None:
    lost = BlockManager(3, 4)
    lost._free.pop()
    with pytest.raises(RuntimeError, match="lost or owned twice"):
        lost.check_integrity()
    double = BlockManager(3, 4)
    table = double.allocate(1)
    double._free.append(table[0])
    with pytest.raises(RuntimeError, match="lost or owned twice"):
        double.check_integrity()
    leaked = BlockManager(3, 4)
    leaked.allocate(1)
    with pytest.raises(RuntimeError, match="reference counts"):
        leaked.check_integrity([])


Step = st.tuples(
    st.sampled_from(["take", "share", "drop", "promise", "withdraw"]), st.integers(0, 9)
)


@settings(max_examples=200, deadline=None)
@given(st.lists(Step, max_size=60), st.booleans())
def test_any_order_of_verbs_conserves_every_block(
    steps: list[tuple[str, int]], cache: bool
) -> None:
    blocks = BlockManager(8, 4, enable_prefix_cache=cache)
    holders: list[list[int]] = []
    names = iter(hashes(1000))
    for verb, number in steps:
        if verb == "take" and number <= blocks.num_available:
            holders.append(blocks.allocate(number))
            for block in holders[-1]:
                blocks.publish(block, next(names))
        elif verb == "share" and holders:
            holders.append(list(holders[number % len(holders)]))
            blocks.acquire(holders[-1])
        elif verb == "drop" and holders:
            blocks.release(holders.pop(number % len(holders)))
        elif verb == "promise" and number <= blocks.num_available:
            blocks.promise(number)
        elif verb == "withdraw" and number <= blocks.num_promised:
            blocks.withdraw_promise(number)
        blocks.check_integrity(holders)
    for table in holders:
        blocks.release(table)
    assert blocks.num_free == 8
