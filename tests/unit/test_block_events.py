"""The block manager tells every block that becomes findable or ceases to be, and a slow reader
that it has missed some."""

from baton.block_hash import block_hashes, root_hash
from baton.engine.block_events import BlockEvents
from baton.engine.block_manager import BlockManager

HASHES = block_hashes(root_hash("m"), list(range(16)), 4)


def fill(blocks: BlockManager, hashes: list[bytes]) -> list[int]:
    table = blocks.allocate(len(hashes))
    for block, digest, parent in zip(table, hashes, [b"", *hashes], strict=False):
        blocks.publish(block, digest, parent)
    return table


def listened(blocks: BlockManager, limit: int = 100) -> tuple[BlockEvents, list[int]]:
    news: list[int] = []
    events = BlockEvents(limit, lambda: news.append(1))
    blocks.report_to(events)
    return events, news


def test_a_new_reader_is_told_that_it_missed_what_came_before() -> None:
    blocks = BlockManager(4, 4)
    fill(blocks, HASHES[:2])
    events, _ = listened(blocks)
    assert events.drain() is None
    assert blocks.published() == [(HASHES[0], b""), (HASHES[1], HASHES[0])]
    assert events.drain() == []


def test_publishing_and_evicting_are_told_in_order() -> None:
    blocks = BlockManager(2, 4)
    events, news = listened(blocks)
    events.drain()
    blocks.release(fill(blocks, HASHES[:2]))
    blocks.allocate(1)
    stored = [(True, HASHES[0], b""), (True, HASHES[1], HASHES[0])]
    assert events.drain() == [*stored, (False, HASHES[1], HASHES[0])]
    assert len(news) == 1
    assert blocks.published() == [(HASHES[0], b"")]


def test_a_block_whose_hash_is_known_already_is_not_told_again() -> None:
    blocks = BlockManager(4, 4)
    events, _ = listened(blocks)
    events.drain()
    fill(blocks, HASHES[:1])
    fill(blocks, HASHES[:1])
    assert events.drain() == [(True, HASHES[0], b"")]


def test_a_flush_takes_back_every_block() -> None:
    blocks = BlockManager(4, 4)
    events, _ = listened(blocks)
    blocks.release(fill(blocks, HASHES[:2]))
    events.drain()
    events.drain()
    blocks.flush()
    assert {(stored, digest) for stored, digest, _ in events.drain() or []} == {
        (False, digest) for digest in HASHES[:2]
    }
    assert blocks.published() == []
    blocks.check_integrity([])


def test_a_reader_that_is_too_slow_is_told_and_hears_what_comes_after() -> None:
    blocks = BlockManager(4, 4)
    events, _ = listened(blocks, limit=2)
    events.drain()
    fill(blocks, HASHES[:3])
    assert events.drain() is None
    fill(blocks, HASHES[3:])
    assert events.drain() == [(True, HASHES[3], b"")]


def test_a_cache_that_is_off_tells_nothing() -> None:
    blocks = BlockManager(4, 4, enable_prefix_cache=False)
    events, _ = listened(blocks)
    events.drain()
    blocks.release(fill(blocks, HASHES[:2]))
    assert events.drain() == []
