"""Pinned prefixes: what they cover, what they cost a tenant, and what eviction does with them."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.block_hash import block_hashes, root_hash
from baton.engine.block_manager import BlockManager
from baton.engine.pins import MOST_PINS, MOST_TOGETHER, Pins


def hashes(count: int, salt: str = "") -> list[bytes]:
    return block_hashes(root_hash("model", cache_salt=salt), list(range(count * 4)), 4)


def cache(blocks: BlockManager, digests: Sequence[bytes]) -> None:
    """As a sequence that computed them and ended."""
    table = blocks.allocate(len(digests))
    for block, digest in zip(table, digests, strict=True):
        blocks.publish(block, digest)
    blocks.release(table)


def manager(num_blocks: int = 8, per_tenant: int = 4) -> BlockManager:
    return BlockManager(num_blocks, 4, pins=Pins(per_tenant, 2 * per_tenant))


def test_pinned_blocks_outlive_others_that_were_used_later() -> None:
    blocks = manager()
    cache(blocks, hashes(3))
    blocks.pin("", hashes(3), expires_at=10.0)
    cache(blocks, hashes(5, "later"))
    blocks.release(blocks.allocate(5))
    assert len(blocks.match_prefix(hashes(3))) == 3 and blocks.num_pinned == 3
    assert blocks.match_prefix(hashes(5, "later")) == []
    assert (blocks.num_evicted, blocks.num_pins_broken) == (5, 0)
    blocks.check_integrity([])


def test_a_prefix_may_be_pinned_before_it_is_computed() -> None:
    blocks = manager()
    blocks.pin("", hashes(2), expires_at=10.0)
    cache(blocks, hashes(2))
    blocks.release(blocks.allocate(6))
    blocks.release(blocks.allocate(6))
    assert len(blocks.match_prefix(hashes(2))) == 2


def test_when_its_time_is_up_a_prefix_is_evicted_like_any_other() -> None:
    blocks = manager()
    cache(blocks, hashes(3))
    blocks.pin("", hashes(3), expires_at=10.0)
    blocks.expire_pins(9.9)
    assert blocks.num_pinned == 3
    blocks.expire_pins(10.0)
    assert blocks.num_pinned == 0
    blocks.release(blocks.allocate(8))
    assert blocks.match_prefix(hashes(3)) == [] and blocks.num_pins_broken == 0


def test_a_pin_never_keeps_a_running_sequence_from_its_block() -> None:
    blocks = manager()
    cache(blocks, hashes(4))
    blocks.pin("", hashes(4), expires_at=10.0)
    assert blocks.num_available == 8
    blocks.allocate(6)
    assert blocks.num_pins_broken == 2
    assert len(blocks.match_prefix(hashes(4))) == 2, "the end of the prefix goes first"
    blocks.check_integrity()


def test_unpinning_and_flushing_end_pins_at_once() -> None:
    blocks = manager()
    cache(blocks, hashes(4))
    pin = blocks.pin("", hashes(2), expires_at=10.0)
    other = blocks.pin("", hashes(4), expires_at=10.0)
    assert pin and other and blocks.num_pinned == 4
    assert blocks.unpin(other.id) and not blocks.unpin(other.id)
    assert blocks.num_pinned == 2, "the shorter pin still covers its blocks"
    blocks.flush()
    assert list(blocks.pins) == [] and blocks.num_cached == 0
    blocks.check_integrity([])


def test_a_pin_covers_the_leading_blocks_that_the_quotas_allow() -> None:
    pins = Pins(per_tenant=4, together=6)
    whole = pins.add("a", hashes(9), 10.0)
    assert whole and whole.hashes == tuple(hashes(9)[:4])
    assert pins.add("a", hashes(3, "x"), 10.0) is None
    half = pins.add("b", hashes(3, "x"), 10.0)
    assert half and len(half.hashes) == 2
    assert pins.add("c", hashes(4), 10.0), "blocks that are pinned already cost others nothing"
    assert pins.add("", [], 10.0) is None


def test_pinning_again_prolongs_and_never_shortens() -> None:
    pins = Pins(4, 8)
    pins.add("", hashes(2), 10.0)
    pins.add("", hashes(2), 5.0)
    assert pins.expire(9.0) == [] and pins.holds(hashes(1)[0])
    pins.add("", hashes(2), 20.0)
    assert pins.expire(19.0) == []
    assert pins.expire(20.0) == hashes(2) and not pins.holds(hashes(1)[0])


def test_the_number_of_pins_of_a_tenant_is_bounded() -> None:
    pins = Pins(10_000, 20_000)
    for number in range(MOST_PINS):
        assert pins.add("a", hashes(1, str(number)), 10.0)
    assert pins.add("a", hashes(1, "one more"), 10.0) is None
    assert pins.add("b", hashes(1, "one more"), 10.0)


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["pin", "unpin", "expire", "cache", "use"]),
            st.sampled_from(["a", "b"]),
            st.integers(0, 6),
            st.integers(1, 9),
        ),
        max_size=40,
    )
)
def test_quotas_and_books_hold_whatever_happens(
    actions: list[tuple[str, str, int, int]],
) -> None:
    blocks, now = manager(num_blocks=10, per_tenant=3), 0.0
    for action, name, count, ttl in actions:
        digests = hashes(count, name)
        if action == "pin":
            blocks.pin(name, digests, now + ttl)
        elif action == "unpin" and digests:
            blocks.unpin(digests[-1].hex())
        elif action == "expire":
            now += ttl
            blocks.expire_pins(now)
        elif action == "cache":
            cache(blocks, digests)
        else:
            blocks.release(blocks.allocate(count))
        blocks.check_integrity([])
        covered = {d for pin in blocks.pins for d in pin.hashes}
        assert all(pin.expires_at > now for pin in blocks.pins) or action != "expire"
        for tenant in "ab":
            mine = {d for pin in blocks.pins if pin.tenant == tenant for d in pin.hashes}
            assert len(mine) <= 3
        assert {d for d in [*hashes(6, "a"), *hashes(6, "b")] if blocks.pins.holds(d)} == covered
        assert blocks.num_pinned == sum(len(blocks.match_prefix([d])) for d in covered)


def test_the_pins_of_all_tenants_are_bounded_even_where_they_share_their_blocks() -> None:
    """Each new name could once pin what was pinned already: records grew until their ttl."""
    pins, shared = Pins(10, 20), hashes(2)
    made = [pins.add(f"tenant-{n}", shared, 10.0) for n in range(MOST_TOGETHER + 5)]
    assert [pin is not None for pin in made] == [True] * MOST_TOGETHER + [False] * 5
    assert pins.add("tenant-0", shared, 20.0), "one that lives may be prolonged"
    pins.expire(20.0)
    assert not list(pins) and not pins.holds(shared[0])
