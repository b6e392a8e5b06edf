"""One incoming hand-off: a `KVReceiver` that writes frames into the reservation's blocks.

Every (layer, block) that decode lacked must arrive exactly once. Frames are expected in order, on
the event loop, and written one by one, by whichever thread has their bytes. A write begins only
while its frame is expected and the hand-off is open, and `abort` waits for one that runs: when it
gives blocks back, nobody writes them any more.
"""

import threading
from dataclasses import dataclass

import numpy as np

from baton.engine.kv_cache import KVCache
from baton.engine.kv_layout import KVLayout
from baton.engine.transfer.base import Commit, HandoffDamaged, HandoffRefused, Payload
from baton.engine.transfer.landing import Landing
from baton.engine.transfer.plan import RAW, FramePlan
from decode_service.reservations import Reservation, Reservations, State


@dataclass(frozen=True, eq=False)
class ExpectedFrame:
    """A `FrameRoom`."""

    handoff: "IncomingHandoff"
    sequence: int
    plan: FramePlan
    own_work: int

    @property
    def work(self) -> int:
        """With that of the write which runs now, since this one would wait for it."""
        return self.own_work + self.handoff.work_running

    def num_bytes(self, part: FramePlan) -> int:
        return self.handoff.num_bytes(part)

    def write(self, part: FramePlan, payload: Payload, checksum: int | None) -> None:
        self.handoff.write(self, part, payload, checksum)


class IncomingHandoff:
    """For a reservation in state RECEIVING. `source` is the sender's layout in blocks of the
    hand-off, which positions count; they may be smaller than the cache's own."""

    def __init__(
        self,
        reservations: Reservations,
        reservation: Reservation,
        cache: KVCache,
        source: KVLayout,
    ) -> None:
        """Raises HandoffRefused."""
        self.bytes_received = 0
        self.blocks_received = 0
        self.num_frames = 0
        self.committed = False
        self.work_running = 0
        """Of the write that runs, in bytes copied."""
        self._reservations = reservations
        self._reservation = reservation
        self._landing = Landing(cache, source, reservation.seq)
        self._approximate = self._landing.converts
        self._ended = False
        self._expected: dict[int, ExpectedFrame] = {}
        """By sequence: booked, and not yet applied."""
        self._writing = threading.Lock()
        num_held = reservation.num_held * (cache.layout.block_size // source.block_size)
        self._asked_for = self._landing.positions[num_held:]
        self._missing = np.zeros((source.num_layers, len(self._landing.table)), dtype=bool)
        """[layer, block position]: asked for, and not booked."""
        self._missing[:, self._asked_for] = True

    def num_bytes(self, plan: FramePlan) -> int:
        return self._landing.num_bytes(plan)

    def expect(self, sequence: int, plan: FramePlan) -> "ExpectedFrame":
        self._check_state()
        if sequence != self.num_frames:
            raise HandoffDamaged(f"frame {sequence} came, {self.num_frames} was next")
        layers, positions = self._place(sequence, plan)
        arrived = ~self._missing[layers, positions].all(axis=0)
        if arrived.any():
            raise HandoffRefused(f"block {positions[arrived][0]} came twice or was not asked for")
        self._missing[layers, positions] = False
        frame = ExpectedFrame(self, sequence, plan, self._landing.work(plan))
        self._expected[sequence] = frame
        self.num_frames += 1
        return frame

    def expect_again(self, sequence: int) -> None:
        with self._writing:
            for number in range(sequence, self.num_frames):
                layers, positions = self._place(number, self._expected.pop(number).plan)
                self._missing[layers, positions] = True
        self.num_frames = sequence

    def write(
        self, frame: "ExpectedFrame", part: FramePlan, payload: Payload, checksum: int | None
    ) -> None:
        with self._writing:
            if self._ended or self._expected.get(frame.sequence) is not frame:
                raise HandoffRefused(f"frame {frame.sequence} is not expected any more")
            self.work_running = frame.own_work
            try:
                self._landing.write(part, payload, checksum)
            finally:
                self.work_running = 0

    def applied(self, sequence: int) -> None:
        self._check_state()
        plan = self._expected.pop(sequence).plan
        self.bytes_received += self.num_bytes(plan)
        self._approximate |= plan.codec != RAW
        self._reservation.on_frame()

    def commit(self, commit: Commit) -> None:
        self._check_state()
        if commit.num_frames != self.num_frames:
            raise HandoffDamaged(f"{commit.num_frames} frames sent, {self.num_frames} received")
        if self._missing.any():
            absent = np.flatnonzero(self._missing.any(axis=0)).tolist()
            raise HandoffDamaged(f"blocks {absent[:8]} are incomplete at commit")
        choices = [first.choice for first in commit.first_tokens]
        if choices != list(self._reservation.seq.choices):
            raise HandoffDamaged(f"first tokens are for choices {choices}")
        self.blocks_received = len(self._asked_for)
        self._reservation.seq.is_approximate = self._approximate
        self._reservations.commit(self._reservation, commit.first_tokens)
        self._ended = self.committed = True

    def abort(self) -> None:
        if not self._ended:
            with self._writing:  # for as long as it takes to copy one frame
                self._ended = True
            self._reservations.abort(self._reservation)

    def _check_state(self) -> None:
        if self._ended or self._reservation.state is not State.RECEIVING:
            raise HandoffRefused("the reservation has ended")

    def _place(self, sequence: int, plan: FramePlan) -> tuple[slice, np.ndarray]:
        """Where in `_missing` a frame belongs."""
        end = plan.layer_start + plan.layer_count
        if plan.layer_count < 1 or end > len(self._missing):
            raise HandoffRefused(f"layers [{plan.layer_start}, {end}) do not exist here")
        if plan.codec not in self._landing.codecs:
            raise HandoffRefused(f"codec {plan.codec!r} is not one of {self._landing.codecs}")
        positions = np.array(plan.positions, dtype=np.int64)
        if not len(positions) or (np.diff(positions) < 1).any():
            raise HandoffRefused(f"frame {sequence} does not name its blocks in ascending order")
        if positions[-1] >= self._missing.shape[1]:
            raise HandoffRefused(f"block {positions[-1]} was not asked for")
        return slice(plan.layer_start, end), positions
