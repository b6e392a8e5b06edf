"""A torch.distributed group of two without a world, through which many messages pass at a time.

The sender is rank 0, the receiver rank 1, on a store of their own. Messages are matched by tags
never used twice, and a receive always offers room for the longest message, because Gloo ends the
process when a message is longer than its receive. A blocked operation ends by its timeout or by
the peer's death; a group with an unmatched operation is closed and a new one is made.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from baton.engine.transfer.base import HandoffError, TransportFailed
from baton.engine.transfer.plan import FramePlan, cut

SENDER, RECEIVER = 0, 1
# NCCL has no tags: one message at a time, in the order of the headers.
DEPTHS = {"gloo": 3, "nccl": 1}
LANE_BUFFERS = {"gloo": 2, "nccl": 1}
CHECKSUM_BYTES = 8

Lane = tuple[Tensor, ...]
"""The staging buffers of one frame: while one of them travels, another is filled or emptied."""


def gloo(store: dist.Store, rank: int, timeout: timedelta, host: str) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    options._threads = 1
    return dist.ProcessGroupGloo(store, rank, 2, options)


def nccl(store: dist.Store, rank: int, timeout: timedelta, host: str) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, 2, options)


_GROUPS = {"gloo": gloo, "nccl": nccl}


class PairGroup:
    """One end of a connected group, its threads and its lanes. `open` makes one."""

    def __init__(
        self, name: str, backend: str, group: Any, max_bytes: int, timeout_s: float
    ) -> None:
        self.name = name
        self.backend = backend
        self.max_bytes = max_bytes
        self.depth = DEPTHS[backend]
        self.ended = asyncio.Event()
        self._group: Any | None = group
        self._next_tag = 1
        self._timeout = timedelta(seconds=timeout_s)
        self._threads = ThreadPoolExecutor(self.depth, f"kv-{backend}")
        self._lanes: asyncio.Queue[Lane] = asyncio.Queue()
        for _ in range(self.depth):
            self._lanes.put_nowait(tuple(self._buffer() for _ in range(LANE_BUFFERS[backend])))

    @staticmethod
    async def open(
        store: dist.Store, name: str, rank: int, backend: str, max_bytes: int,
        host: str, timeout_s: float,
    ) -> "PairGroup":  # fmt: skip
        """Waits for the other side. Raises TransportFailed."""
        timeout = timedelta(seconds=timeout_s)

        def connect() -> Any:
            return _GROUPS[backend](store, rank, timeout, host)

        try:
            group = await asyncio.to_thread(connect)
        except (RuntimeError, ValueError) as error:
            raise TransportFailed(f"{backend} does not connect: {error}") from error
        return PairGroup(name, backend, group, max_bytes, timeout_s)

    @property
    def num_bytes(self) -> int:
        return self.depth * LANE_BUFFERS[self.backend] * self.max_bytes

    def parts(self, plan: FramePlan, num_bytes: Callable[[FramePlan], int]) -> list[FramePlan]:
        """A frame's messages, alike at both ends. Raises TransportFailed if they are too long."""
        parts = cut(plan, num_bytes, self.max_bytes)
        if max(map(num_bytes, parts)) > self.max_bytes:
            raise TransportFailed(f"a block is more than the group's messages, {self.max_bytes}")
        return parts

    def next_tag(self, count: int = 1) -> int:
        """The first of so many."""
        first, self._next_tag = self._next_tag, self._next_tag + count
        return first

    async def take(self) -> Lane:
        return await self._lanes.get()

    def give(self, lane: Lane) -> None:
        self._lanes.put_nowait(lane)

    def start(self, work: Callable[[], None]) -> "asyncio.Future[None]":
        """Runs `send` or `receive` in a thread of the group. A lane belongs to the thread until it
        is done."""
        if self._group is None:
            raise TransportFailed("the group is closed")
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        running.add_done_callback(self._notice)
        return running

    def send(self, lane: Lane, tag: int, fills: ListOf[Callable[[Tensor], Tensor]]) -> None:
        """A message per function: what it makes of a buffer."""
        going: deque[Any] = deque()
        for number, fill in enumerate(fills):
            if len(going) == len(lane):
                self._finish(going.popleft())
            message = fill(lane[number % len(lane)])
            going.append(self._begin("send", message, RECEIVER, tag + number))
        while going:
            self._finish(going.popleft())

    def receive(
        self, lane: Lane, tag: int, sizes: ListOf[int], take: Callable[[int, Tensor], None]
    ) -> None:
        """`take` gets the number of each message and what came. If it raises HandoffError, what
        is still on its way is received before that is raised."""
        refusal: HandoffError | None = None
        coming: deque[Any] = deque()
        for number in range(-len(lane), len(sizes)):
            if number >= 0:
                self._finish(coming.popleft())
                try:
                    if refusal is None:
                        take(number, lane[number % len(lane)][: sizes[number]])
                except HandoffError as error:
                    refusal = error
            if (ahead := number + len(lane)) < len(sizes):
                room = lane[ahead % len(lane)]
                room = room if self.backend == "gloo" else room[: sizes[ahead]]
                coming.append(self._begin("recv", room, SENDER, tag + ahead))
        if refusal is not None:
            raise refusal

    def _begin(self, verb: str, tensor: Tensor, peer: int, tag: int) -> Any:
        group = self._group
        if group is None:
            raise TransportFailed("the group is closed")
        try:
            return getattr(group, verb)([tensor], peer, tag)
        except RuntimeError as error:
            raise TransportFailed(f"{self.backend} {verb}: {error}") from error

    def _finish(self, work: Any) -> None:
        try:
            work.wait(self._timeout)
            if self.backend == "nccl":
                torch.cuda.current_stream().synchronize()
        except RuntimeError as error:
            raise TransportFailed(f"{self.backend}: {error}") from error

    def _buffer(self) -> Tensor:
        device = "cuda" if self.backend == "nccl" else "cpu"
        return torch.empty(self.max_bytes + CHECKSUM_BYTES, dtype=torch.uint8, device=device)

    def _notice(self, work: "asyncio.Future[None]") -> None:
        if work.cancelled() or not isinstance(work.exception(), HandoffError | None):
            self.ended.set()

    def close(self) -> None:
        """Operations still running keep the connection until they end or time out."""
        self.ended.set()
        self._group = None
        self._threads.shutdown(wait=False)
