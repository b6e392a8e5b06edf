"""Who owns which KV block. Plain bookkeeping: no torch, no clock, not thread-safe.

Every block has exactly one state:

| state    | read by                 | written by            | left by                     |
|----------|-------------------------|-----------------------|-----------------------------|
| free     | nobody                  | nobody                | `allocate`                  |
| held, 1  | its holder              | its holder (not full) | `release`, `acquire`        |
| held, >1 | its holders             | nobody: copy on write | `release` by each holder    |
| cached   | nobody until `acquire`d | nobody                | `acquire`, or `allocate`    |

A holder is a sequence or a hand-off in flight. `publish` gives a full, computed block its
hash; full blocks are never written again, so sharing them needs no copy. A promise is a
number of blocks kept back for hand-offs that will come; it names no block. In a model whose
layers all have a window, a sequence gives back the blocks that no layer will see again (its
table then holds `NO_BLOCK` there); until they are evicted they are still found by their hash.
A pin is no holder: it only puts cached blocks at the end of the order of eviction.
Invariant: free + cached + held = total, and promised ≤ free + cached.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from baton.engine.block_events import BlockEvents
from baton.engine.idle_blocks import IdleBlocks
from baton.engine.pins import Pin, Pins
from baton.engine.prefix_table import PrefixTable
from baton.engine.sequence import NO_BLOCK
from baton.engine.sequence import Sequence as TokenSequence


class NoFreeBlocks(Exception):
    """The pool cannot give the blocks asked for."""


class BlockManager:
    """Reference counts, the prefix cache with its eviction order, and promises. `window`: how
    many tokens, itself included, a token sees at most; None when some layer sees them all.
    `num_tail_blocks`: how many each sequence holds beside its table, for its newest tokens."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_cache: bool = True,
        window: int | None = None,
        num_tail_blocks: int = 0,
        pins: Pins | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_cache = enable_prefix_cache
        self.window = window
        self.num_tail_blocks = num_tail_blocks
        self.num_promised = 0
        self.num_reused = 0
        """Blocks of prefixes that were found and taken; this and the next two only grow."""
        self.num_evicted = 0
        self.num_pins_broken = 0
        """Pinned blocks among those: everything else was held."""
        self.pins = pins or Pins(0, 0)
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached = IdleBlocks()
        self._refs = [0] * num_blocks
        self._table = PrefixTable()

    def report_to(self, events: BlockEvents | None) -> None:
        """Lets it hear of every block that becomes findable or ceases to be; None: nobody."""
        self._table.events = events

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_pinned(self) -> int:
        """Cached blocks that a pin covers."""
        return self._cached.num_pinned

    @property
    def num_available(self) -> int:
        """Blocks that may be taken without breaking a promise."""
        return self.num_free - self.num_promised

    def can_take(self, new: int, reused: Iterable[int]) -> bool:
        """Whether `new` blocks may be allocated beside acquiring the `reused` ones."""
        unheld = sum(block != NO_BLOCK and self._refs[block] == 0 for block in reused)
        return new + unheld <= self.num_available

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_outside(self, num_tokens: int, unit: int = 1) -> int:
        """Leading blocks that the token after `num_tokens` and all later ones do not see; `unit`:
        only those whose tokens lie in whole blocks of so many tokens that they do not see."""
        if self.window is None:
            return 0
        return max(0, num_tokens + 1 - self.window) // unit * unit // self.block_size

    # --- promises ---------------------------------------------------------------------------

    def promise(self, count: int) -> None:
        if count > self.num_available:
            raise NoFreeBlocks(f"{count} blocks asked for, {self.num_available} available")
        self.num_promised += count

    def withdraw_promise(self, count: int) -> None:
        if count > self.num_promised:
            raise ValueError(f"{count} blocks given back, {self.num_promised} promised")
        self.num_promised -= count

    # --- blocks -----------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks with one reference each, evicting the longest unused ones."""
        if count > self.num_available:
            raise NoFreeBlocks(f"{count} blocks asked for, {self.num_available} available")
        return [self._take() for _ in range(count)]

    def acquire(self, blocks: Iterable[int]) -> None:
        """Adds one reference to each held or cached block."""
        for block in blocks:
            if block == NO_BLOCK:
                continue
            if self._refs[block] == 0:
                self._cached.remove(block)
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference to each. The end of a prefix is evicted before its beginning."""
        for block in reversed(blocks):
            if block == NO_BLOCK:
                continue
            if self._refs[block] < 1:
                raise ValueError(f"block {block} released but held by nobody")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._put_back(block)

    def reuse(self, blocks: Sequence[int]) -> None:
        """Acquires the blocks of a prefix that was found."""
        self.num_reused += sum(block != NO_BLOCK for block in blocks)
        self.acquire(blocks)

    def is_shared(self, block: int) -> bool:
        return self._refs[block] > 1

    # --- prefix cache -----------------------------------------------------------------------

    def match_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest known prefix; takes no reference."""
        return self._table.leading(hashes)

    def publish(self, block: int, digest: bytes, parent: bytes = b"") -> None:
        """Makes a full, computed block findable after `parent` (empty: a first block). The first
        block with a hash keeps it."""
        if self.enable_prefix_cache:
            self._table.add(block, digest, parent)

    def published(self) -> list[tuple[bytes, bytes]]:
        """Hash and parent of every findable block, oldest first."""
        return self._table.entries()

    def pin(self, tenant: str, hashes: Sequence[bytes], expires_at: float) -> Pin | None:
        """Keeps a prefix, once it is cached, from being evicted before anything else."""
        pin = self.pins.add(tenant, hashes, expires_at)
        self._move(pin.hashes if pin else (), pinned=True)
        return pin

    def unpin(self, pin_id: str) -> bool:
        """False when there is no such pin."""
        known = any(pin.id == pin_id for pin in self.pins)
        self._move(self.pins.remove(pin_id), pinned=False)
        return known

    def expire_pins(self, now: float) -> None:
        self._move(self.pins.expire(now), pinned=False)

    def _move(self, hashes: Sequence[bytes], pinned: bool) -> None:
        for digest in reversed(hashes):  # the end of a prefix goes before its beginning
            self._cached.move(self._table.find(digest), pinned)

    def flush(self) -> None:
        """Forgets every cached block, and all pins; held blocks stay but are no longer found."""
        self.pins.clear()
        for block in self._table.blocks():
            self._table.remove(block)
        self._free.extend(self._cached)
        self._cached.clear()

    # --- sequences --------------------------------------------------------------------------

    def publish_computed(self, seq: TokenSequence) -> None:
        """Publishes the blocks that computation has filled since the last call, as long as the
        table holds all tokens as this worker computes them."""
        if seq.num_dropped_tokens or seq.is_approximate or not seq.kv_policy.shares_prefix:
            return
        hashes = seq.full_block_hashes(self.block_size, seq.num_computed_tokens)
        for position in range(seq.num_published_blocks, len(hashes)):
            parent = hashes[position - 1] if position else b""
            self.publish(seq.block_table[position], hashes[position], parent)
        seq.num_published_blocks = max(seq.num_published_blocks, len(hashes))

    def reusable_prefix(self, seq: TokenSequence) -> list[int]:
        """Cached blocks `seq` may start from. Its last token is always left to compute: the
        logits of that position are needed."""
        hashes = self._reusable_hashes(seq)
        if self.window is None:
            return self.match_prefix(hashes)
        return self._match_window(hashes, seq.peer_block_size)

    def next_missing(self, seq: TokenSequence) -> tuple[int, bytes] | None:
        """Position and hash of the first block that `seq` could reuse if it were cached; None
        when there is none, and where caching by prefix does not apply."""
        if not self.enable_prefix_cache or self.window is not None:
            return None
        hashes = self._reusable_hashes(seq)
        known = len(self.match_prefix(hashes))
        return (known, hashes[known]) if known < len(hashes) else None

    def known_of_handoff(self, seq: TokenSequence) -> list[int]:
        """Leading blocks that a hand-off of all of `seq`'s tokens need not bring: outside every
        window of what follows, or cached here. A cache that lacks tokens is shared with nobody."""
        if seq.dropped_of(seq.num_initial_tokens, self.block_size):
            return []
        outside = self.num_outside(len(seq.token_ids))
        return [NO_BLOCK] * outside + self.match_prefix(self._reusable_hashes(seq)[outside:])

    def give_back_outside(self, seq: TokenSequence) -> None:
        """Gives back the blocks that no token of `seq` will see again and no hand-off ships."""
        first = seq.num_outside_blocks
        end = self.num_outside(seq.num_computed_tokens, seq.peer_block_size)
        if end > first:
            # The first to be evicted is the one that the fewest prefixes could still use.
            self.release(seq.block_table[first:end][::-1])
            seq.block_table[first:end] = [NO_BLOCK] * (end - first)

    def release_sequence(self, seq: TokenSequence) -> None:
        self.release(seq.held_blocks)
        seq.block_table, seq.tail_blocks, seq.compact_blocks = [], [], []

    def _reusable_hashes(self, seq: TokenSequence) -> list[bytes]:
        if not self.enable_prefix_cache:
            return []
        reusable = seq.kv_policy.reusable(len(seq.token_ids), seq.num_prompt_tokens)
        return seq.full_block_hashes(self.block_size, reusable)

    def _match_window(self, hashes: Sequence[bytes], unit: int) -> list[int]:
        """The longest prefix of which all that its next token sees is cached, and all else in the
        first block of `unit` tokens of which it sees any."""
        found = [self._table.find(digest) for digest in hashes]
        run_start = best = 0
        for position, block in enumerate(found):
            if block == NO_BLOCK:
                run_start = position + 1
            outside = self.num_outside((position + 1) * self.block_size, unit)
            if run_start == 0 or run_start <= outside <= position:
                best = position + 1
        outside = self.num_outside(best * self.block_size, unit)
        return [NO_BLOCK] * outside + found[outside:best]

    def check_integrity(self, holders: Iterable[Sequence[int]] | None = None) -> None:
        """Raises RuntimeError when the books do not add up. With `holders` (the tables of all
        sequences and hand-offs) it also compares each reference count."""
        held = [b for b in range(self.num_blocks) if self._refs[b] > 0]
        states = sorted([*self._free, *self._cached, *held])
        if states != list(range(self.num_blocks)):
            raise RuntimeError(f"blocks lost or owned twice: {_odd(states, self.num_blocks)}")
        if not 0 <= self.num_promised <= self.num_free:
            raise RuntimeError(f"{self.num_promised} promised, {self.num_free} free")
        if any(self._table.hash_of(block) is None for block in self._cached):
            raise RuntimeError("a cached block has no hash")
        self._table.check_integrity()
        if holders is not None:
            counts = Counter(block for table in holders for block in table if block != NO_BLOCK)
            wrong = {b: (self._refs[b], counts[b]) for b in range(self.num_blocks)
                     if self._refs[b] != counts[b]}  # fmt: skip
            if wrong:
                raise RuntimeError(f"reference counts (kept, true) differ: {wrong}")

    # --- internal ---------------------------------------------------------------------------

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, pinned = self._cached.pop()
            self.num_evicted += 1
            self.num_pins_broken += pinned
            self._table.remove(block)
        self._refs[block] = 1
        return block

    def _put_back(self, block: int) -> None:
        if (digest := self._table.hash_of(block)) is not None:
            self._cached.add(block, self.pins.holds(digest))
        else:
            self._free.append(block)


def _odd(states: list[int], total: int) -> dict[int, int]:
    counts = Counter(states)
    return {block: counts[block] for block in range(total) if counts[block] != 1}
