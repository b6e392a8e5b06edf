"""One incoming hand-off: a `KVReceiver` that writes frames into the reservation's blocks.

Every (layer, block) that decode lacked must arrive exactly once. `receive` never returns, nor
is it cancelled, while its write is running: when `abort` gives blocks back, nobody writes them.
"""

import asyncio
from collections.abc import Callable

from baton.engine.kv_cache import KVCache
from baton.engine.transfer.base import Commit, HandoffDamaged, HandoffRefused, KVFrame
from baton.engine.transfer.payload import num_bytes, write_frame
from decode_service.reservations import Reservation, Reservations, State


class IncomingHandoff:
    """For a reservation in state RECEIVING."""

    def __init__(
        self,
        reservations: Reservations,
        reservation: Reservation,
        cache: KVCache,
    ) -> None:
        self.bytes_received = 0
        self.blocks_received = 0
        self.committed = False
        self._reservations = reservations
        self._reservation = reservation
        self._cache = cache
        self.num_frames = 0
        self._ended = False
        positions = reservation.seq.handoff_positions(cache.layout.block_size)
        all_layers = (1 << cache.layout.num_layers) - 1
        self._missing = dict.fromkeys(positions[reservation.num_held :], all_layers)
        """Block position → bit set of the layers that have not arrived."""

    async def receive(self, frame: KVFrame) -> None:
        """Raises HandoffDamaged or HandoffRefused."""
        self._check_state()
        self._check_frame(frame)
        await _finish_before_leaving(write_frame, self._cache, frame, self._table())
        self._check_state()
        self.bytes_received += num_bytes(frame.payload)
        self._reservation.on_frame()

    async def commit(self, commit: Commit) -> None:
        self._check_state()
        if commit.num_frames != self.num_frames:
            raise HandoffDamaged(f"{commit.num_frames} frames sent, {self.num_frames} received")
        if any(self._missing.values()):
            absent = [p for p, layers in self._missing.items() if layers]
            raise HandoffDamaged(f"blocks {absent[:8]} are incomplete at commit")
        choices = [first.choice for first in commit.first_tokens]
        if choices != list(self._reservation.seq.choices):
            raise HandoffDamaged(f"first tokens are for choices {choices}")
        self.blocks_received = len(self._missing)
        self._reservations.commit(self._reservation, commit.first_tokens)
        self._ended = self.committed = True

    async def abort(self) -> None:
        if not self._ended:
            self._ended = True
            self._reservations.abort(self._reservation)

    def _table(self) -> list[int]:
        return self._reservation.seq.held_blocks

    def _check_state(self) -> None:
        if self._ended or self._reservation.state is not State.RECEIVING:
            raise HandoffRefused("the reservation has ended")

    def _check_frame(self, frame: KVFrame) -> None:
        """Books the frame as arrived."""
        if frame.sequence != self.num_frames:
            raise HandoffDamaged(f"frame {frame.sequence} came, {self.num_frames} was next")
        end = frame.layer_start + frame.layer_count
        if frame.layer_count < 1 or end > self._cache.layout.num_layers:
            raise HandoffRefused(f"layers [{frame.layer_start}, {end}) do not exist here")
        layers = ((1 << frame.layer_count) - 1) << frame.layer_start
        for position in frame.positions:
            if self._missing.get(position, 0) & layers != layers:
                raise HandoffRefused(f"block {position} came twice or was not asked for")
            self._missing[position] &= ~layers
        self.num_frames += 1


async def _finish_before_leaving(function: Callable[..., None], *args: object) -> None:
    """Runs in a thread; a cancellation is obeyed only after the thread is done."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            try:
                await asyncio.wait({work})
            except asyncio.CancelledError:
                continue
        raise
