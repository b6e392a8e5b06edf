"""Decode's promises of room, from the request to the committed hand-off. No torch, no I/O.

A reservation pins the prompt's cached prefix and promises the number of blocks still missing;
they are taken when the first frame arrives, so a queue at prefill does not idle memory.

    reserved --open--> receiving --commit--> committed
        ^                  |                     |
        +--abort, fence----+        cancel: from any state, once

Owners: while reserved, the pinned prefix belongs to the reservation; while receiving, all
blocks belong to the open hand-off, and only its end gives them back, so that no writer is
ever left with blocks of somebody else; once committed they belong to the sequences.
Each `open` must carry a generation newer than the last one: late attempts are refused, and one
that is still open when a newer one comes is fenced: told to end, and waited for.
"""

import asyncio
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from baton.engine.beam_group import accept_beam
from baton.engine.block_manager import NoFreeBlocks
from baton.engine.decode_scheduler import DecodeScheduler
from baton.engine.engine import Engine
from baton.engine.policy_blocks import need, num_tail_blocks
from baton.engine.sequence import Sequence, SequenceStatus, StepOutput
from baton.engine.transfer.base import FirstToken, HandoffRefused

# The copy of one frame into blocks is all that a hand-off which was told to end still does.
FENCE_S = 5.0


class State(Enum):
    RESERVED = auto()
    RECEIVING = auto()
    COMMITTED = auto()
    CANCELLED = auto()


@dataclass
class Reservation:
    """`seq.held_blocks` is what the reservation owns at the moment."""

    seq: Sequence
    num_held: int
    """Leading prompt blocks that need not come: in the prefix cache, now pinned, or outside every
    window."""
    num_promised: int
    next_generation: int = 0
    state: State = State.RESERVED
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(16), repr=False)
    """Whoever fills the reservation must know it."""
    first_tokens: tuple[FirstToken, ...] = ()
    committed_at: float | None = None
    on_committed: Callable[[], None] = lambda: None
    on_frame: Callable[[], None] = lambda: None
    """The sender is alive: renews the lease."""
    end_receiving: Callable[[], object] = lambda: None
    """Set by the open hand-off: ends its receiving at once."""
    writers_gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when an open hand-off has ended without commit."""


class Reservations:
    """All verbs run on the event loop and take the engine's lock for bookkeeping only."""

    def __init__(self, engine: Engine[DecodeScheduler]) -> None:
        self._engine = engine
        self._scheduler = engine.scheduler
        self._blocks = engine.blocks
        self._open: dict[str, Reservation] = {}

    def __len__(self) -> int:
        return len(self._open)

    def reserve(self, seq: Sequence) -> Reservation:
        """Raises NoFreeBlocks when there is no room now."""
        reservation = self._engine.apply(lambda: self._reserve(seq))
        self._open[reservation.id] = reservation
        return reservation

    def find(self, reservation_id: str, secret: bytes) -> Reservation:
        """Raises HandoffRefused, in the same words whether the id or the secret is wrong."""
        reservation = self._open.get(reservation_id)
        if reservation is None or not hmac.compare_digest(reservation.secret, secret):
            raise HandoffRefused(f"reservation {reservation_id} is unknown or has ended")
        return reservation

    async def fence(self, reservation: Reservation, generation: int) -> None:
        """Ends a hand-off of an older generation that is still open; raises HandoffRefused."""
        self._check_newer(reservation, generation)
        reservation.next_generation = generation
        if reservation.state is State.RECEIVING:
            reservation.end_receiving()
            try:
                async with asyncio.timeout(FENCE_S):
                    await reservation.writers_gone.wait()
            except TimeoutError:
                raise HandoffRefused(f"the older attempt still writes after {FENCE_S} s") from None

    def open(self, reservation: Reservation, generation: int) -> None:
        """Takes the promised blocks for a hand-off; raises HandoffRefused."""
        self._check_newer(reservation, generation)
        if reservation.state is not State.RESERVED:
            raise HandoffRefused(f"the reservation is {reservation.state.name.lower()} already")
        self._engine.apply(lambda: self._take_blocks(reservation))
        reservation.next_generation = generation + 1
        reservation.state = State.RECEIVING
        reservation.writers_gone.clear()

    def _check_newer(self, reservation: Reservation, generation: int) -> None:
        if self._open.get(reservation.id) is not reservation:
            raise HandoffRefused(f"reservation {reservation.id} is unknown or has ended")
        if generation < reservation.next_generation:
            raise HandoffRefused(
                f"generation {generation} is late, {reservation.next_generation} is next"
            )

    def abort(self, reservation: Reservation) -> None:
        """The open hand-off has ended without commit and writes no more."""
        if reservation.state is State.RECEIVING:
            self._engine.apply(lambda: self._promise_again(reservation))
            reservation.state = State.RESERVED
        elif reservation.state is State.CANCELLED:
            self._engine.apply(lambda: self._release(reservation))
        reservation.writers_gone.set()

    def commit(self, reservation: Reservation, first_tokens: tuple[FirstToken, ...]) -> None:
        """All KV has landed: the live choices join the running batch."""
        if reservation.state is not State.RECEIVING:
            raise HandoffRefused("the request has ended")
        reservation.committed_at = time.monotonic()
        self._engine.apply(lambda: self._join(reservation, first_tokens))
        reservation.state = State.COMMITTED
        reservation.first_tokens = first_tokens
        reservation.on_committed()

    def cancel(self, reservation: Reservation) -> None:
        """Ends a reservation whatever its state; its sequences end with their stream."""
        self._open.pop(reservation.id, None)
        state, reservation.state = reservation.state, State.CANCELLED
        if state is State.RESERVED:
            self._engine.apply(lambda: self._drop(reservation))
        elif state is State.RECEIVING:
            reservation.end_receiving()

    def start_beams(self, reservation: Reservation) -> list[StepOutput]:
        """Begins a committed beam search with the candidates that prefill has found."""
        seq, scheduler = reservation.seq, self._scheduler
        first = reservation.first_tokens[0].token

        def start() -> list[StepOutput]:
            ended = seq.status is SequenceStatus.ENDED
            return [] if ended else accept_beam(scheduler, seq, first)

        return self._engine.apply(start)

    # --- under the engine's lock ------------------------------------------------------------

    def _reserve(self, seq: Sequence) -> Reservation:
        """Not at the cost of who waits already: it starts with the next steps, and finds room."""
        scheduler, blocks, most = self._scheduler, self._blocks, self._scheduler.config.max_num_seqs
        choices = sum(len(s.choices) for s in (*scheduler.running, *scheduler.waiting, seq))
        if choices + scheduler.num_promised_seqs > most:
            raise NoFreeBlocks(f"{most} sequences run, wait or are promised")
        held = blocks.known_of_handoff(seq)
        seq.num_dropped_tokens = seq.dropped_of(seq.num_initial_tokens, blocks.block_size)
        # One more block per choice, so that it is not preempted as soon as it starts.
        each = 1 + num_tail_blocks(scheduler.config, seq)
        wanted = self._num_blocks(seq) + each * len(seq.choices)
        promised, owed = min(wanted, blocks.num_blocks) - len(held), self._owed()
        if not blocks.can_take(promised + owed, held):
            raise NoFreeBlocks(
                f"{promised} blocks needed, {owed} by who waits, {blocks.num_available} available"
            )
        blocks.reuse(held)
        blocks.promise(promised)
        scheduler.num_promised_seqs += len(seq.choices)
        seq.block_table = held
        return Reservation(seq, len(held), promised)

    def _owed(self) -> int:
        """Blocks of sequences that have not started, at most."""
        config = self._scheduler.config
        waiting = self._scheduler.waiting
        return sum(need(config, seq, len(seq.token_ids)).total for seq in waiting)

    def _take_blocks(self, reservation: Reservation) -> None:
        seq = reservation.seq
        self._blocks.withdraw_promise(reservation.num_promised)
        missing = self._num_blocks(seq) - reservation.num_held
        new = self._blocks.allocate(missing + num_tail_blocks(self._scheduler.config, seq))
        seq.block_table = seq.block_table + new[:missing]
        seq.tail_blocks = new[missing:]

    def _num_blocks(self, seq: Sequence) -> int:
        """Of what a hand-off brings and of what is held already."""
        return self._blocks.blocks_for(seq.num_initial_tokens - seq.num_dropped_tokens)

    def _promise_again(self, reservation: Reservation) -> None:
        seq = reservation.seq
        self._blocks.release(seq.held_blocks[reservation.num_held :])
        seq.block_table, seq.tail_blocks = seq.block_table[: reservation.num_held], []
        # Others may have grown meanwhile; the blocks just freed are promised in any case.
        reservation.num_promised = min(reservation.num_promised, self._blocks.num_available)
        self._blocks.promise(reservation.num_promised)

    def _drop(self, reservation: Reservation) -> None:
        self._blocks.withdraw_promise(reservation.num_promised)
        self._release(reservation)

    def _release(self, reservation: Reservation) -> None:
        self._scheduler.num_promised_seqs -= len(reservation.seq.choices)
        self._blocks.release_sequence(reservation.seq)

    def _join(self, reservation: Reservation, first_tokens: tuple[FirstToken, ...]) -> None:
        seq, scheduler = reservation.seq, self._scheduler
        scheduler.num_promised_seqs -= len(seq.choices)
        seq.num_computed_tokens = seq.num_initial_tokens
        seq.num_published_blocks = reservation.num_held
        self._blocks.publish_computed(seq)
        if seq.sampling.beam is not None:
            scheduler.join([seq])  # idle until `start_beams`: no token has been appended
            return
        live = [first for first in first_tokens if first.finish_reason is None]
        if not live:
            self._blocks.release_sequence(seq)
            return
        children = scheduler.fork(seq, [first.choice for first in live])
        for child, first in zip(children, live, strict=True):
            child.token_ids.append(first.token.token_id)
        scheduler.join(children)
