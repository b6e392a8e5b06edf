"""One outgoing hand-off: ships blocks as soon as they are computed, then commits.

Its task runs beside the computation of later chunks. It reads only blocks whose KV is
complete and which the sequence still holds: the owner calls `stop` before ending the sequence.
"""

import asyncio
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from baton.engine.sequence import Sequence, StepOutput
from baton.engine.transfer.base import FirstToken, HandoffError, KVSender
from baton.engine.transfer.plan import FramePlan


class _Progress(NamedTuple):
    num_tokens: int
    layers: range


class Handoff:
    """Made on the event loop."""

    def __init__(self, sender: KVSender, num_layers: int, seq: Sequence) -> None:
        self.sender = sender
        self.blocks_sent = 0
        self.committed = False
        self.transfers: list[tuple[float, float]] = []
        """When KV was on its way, monotonic clock: one span per chunk, and the commit's."""
        self._seq = seq
        # What its policy keeps of a prompt is not known, or not in its place, before the end.
        self._goes_early = not seq.dropped_of(seq.num_initial_tokens, sender.block_size)
        self._next_block = [0] * num_layers
        """Of each layer."""
        # Bounded by the number of reports per chunk and of chunks of a prompt.
        self._progress: asyncio.Queue[_Progress | tuple[FirstToken, ...]] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())

    def advance(self, num_computed_tokens: int, layers: range | None = None) -> None:
        """KV of so many tokens is complete, in these layers or in all."""
        if self._task.done():
            return
        self.sender.open()
        if not self._goes_early:
            return
        progress = _Progress(num_computed_tokens, layers or range(len(self._next_block)))
        self._progress.put_nowait(progress)

    async def complete(self, firsts: tuple[StepOutput, ...]) -> None:
        """Ships the rest and commits. Raises HandoffError when it failed: decode did not take it,
        or what was to be shipped cannot be read."""
        tokens = (
            FirstToken(output.choice, output.token, output.index, output.finish_reason)
            for output in firsts
            if output.token is not None
        )
        self._progress.put_nowait(tuple(tokens))
        try:
            await asyncio.shield(self._task)
        except ValueError as error:  # ours: the request's own values have been checked by now
            raise HandoffError("the blocks of the prompt could not be shipped") from error
        self.committed = True

    async def stop(self) -> None:
        """Ends the task; what was not committed is aborted."""
        self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.exception()  # seen: `complete` has raised it, or nobody needs it

    async def _run(self) -> None:
        try:
            while isinstance(done := await self._progress.get(), _Progress):
                await self._send_until(done.num_tokens // self.sender.block_size, done.layers)
            positions = self._seq.handoff_positions(self.sender.block_size)
            end = positions[-1] + 1 if positions else 0  # a policy may keep nothing
            for layers in self._level_layers():
                await self._send_until(end, layers)
            self.blocks_sent = len([p for p in positions if p not in self.sender.held])
            with self._timed():
                await self.sender.commit(done)
        finally:
            await self.sender.abort()

    async def _send_until(self, end_block: int, layers: range) -> None:
        """`layers` have come equally far."""
        start, held = self._next_block[layers.start], self.sender.held
        wanted = self._seq.handoff_positions(self.sender.block_size)
        positions = [p for p in wanted if start <= p < end_block and p not in held]
        for layer in layers:
            self._next_block[layer] = max(start, end_block)
        if positions:
            with self._timed():
                await self.sender.send(FramePlan(layers.start, len(layers), tuple(positions)))

    def _level_layers(self) -> list[range]:
        """Ranges of layers that have come equally far."""
        start, ranges = 0, []
        for _, group in itertools.groupby(self._next_block):
            end = start + len(list(group))
            ranges.append(range(start, end))
            start = end
        return ranges

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.transfers.append((start, time.monotonic()))
