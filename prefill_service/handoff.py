"""One outgoing hand-off: ships blocks as soon as they are computed, then commits.

Its task runs beside the computation of later chunks. It reads only blocks whose KV is
complete and which the sequence still holds: the owner calls `stop` before ending the sequence.
"""

import asyncio
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from baton.engine.kv_layout import KVLayout
from baton.engine.sequence import Sequence, StepOutput
from baton.engine.transfer.base import FirstToken, KVSender
from baton.engine.transfer.plan import FramePlan


class Handoff:
    """`held` are the block positions that decode already has. Made on the event loop."""

    def __init__(
        self, sender: KVSender, layout: KVLayout, seq: Sequence, held: Collection[int]
    ) -> None:
        self.sender = sender
        self.blocks_sent = 0
        self.committed = False
        self.transfers: list[tuple[float, float]] = []
        """When KV was on its way, monotonic clock: one span per chunk, and the commit's."""
        self._layout = layout
        self._seq = seq
        self._held = frozenset(held)
        self._next_block = 0
        # Bounded by the number of chunks of a prompt.
        self._progress: asyncio.Queue[int | tuple[FirstToken, ...]] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())

    def advance(self, num_computed_tokens: int) -> None:
        """KV of so many tokens is complete."""
        self.sender.open()
        self._progress.put_nowait(num_computed_tokens)

    async def complete(self, firsts: tuple[StepOutput, ...]) -> None:
        """Ships the rest and commits. Raises HandoffError when decode did not take it."""
        tokens = (
            FirstToken(output.choice, output.token, output.index, output.finish_reason)
            for output in firsts
            if output.token is not None
        )
        self._progress.put_nowait(tuple(tokens))
        await asyncio.shield(self._task)
        self.committed = True

    async def stop(self) -> None:
        """Ends the task; what was not committed is aborted."""
        self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.exception()  # seen: `complete` has raised it, or nobody needs it

    async def _run(self) -> None:
        block_size = self._layout.block_size
        try:
            while isinstance(done := await self._progress.get(), int):
                await self._send_until(done // block_size)
            await self._send_until(len(self._seq.held_blocks))
            with self._timed():
                await self.sender.commit(done)
        finally:
            await self.sender.abort()

    async def _send_until(self, end_block: int) -> None:
        wanted = self._seq.handoff_positions(self._layout.block_size)
        due = [p for p in wanted if self._next_block <= p < end_block]
        positions = [p for p in due if p not in self._held]
        self._next_block = max(self._next_block, end_block)
        if positions:
            with self._timed():
                await self.sender.send(FramePlan(0, self._layout.num_layers, tuple(positions)))
        self.blocks_sent += len(positions)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.transfers.append((start, time.monotonic()))
