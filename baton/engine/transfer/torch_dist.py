"""Payloads as point-to-point messages of torch.distributed, in groups of two without a world.

Each sender (rank 0) has a group of its own with each receiver (rank 1), on a store of their own.
The backend is a string: "gloo" or "nccl". Messages are matched by tags never used twice,
and a receive always offers room for the longest message, because Gloo ends the process when a
message is longer than its receive. A blocked operation ends by its timeout or by the peer's
death; a group with an unmatched operation is closed and a new one is made.
"""

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from baton.engine.transfer.base import (
    MAX_FRAME_BYTES,
    BlockReader,
    Shipment,
    TorchMessage,
    TransportFailed,
)
from baton.engine.transfer.plan import FramePlan

SENDER, RECEIVER = 0, 1
# NCCL has no tags: one message at a time, in the order of the headers.
DEPTHS = {"gloo": 3, "nccl": 1}
CHECKSUM_BYTES = 8
FRAME_BYTES = 8 << 20
"""Half as many headers and acknowledgements as with inline frames; their work is what a fast link
waits for."""


def backends(device: str) -> list[str]:
    """What a cache on this device can use, best first."""
    if not dist.is_available():
        return []
    nccl = device == "cuda" and dist.is_nccl_available()
    return ["nccl"] if nccl else ["gloo"] * (device == "cpu" and dist.is_gloo_available())


def _gloo(store: dist.Store, rank: int, timeout: timedelta, host: str) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    options._threads = 1
    return dist.ProcessGroupGloo(store, rank, 2, options)


def _nccl(store: dist.Store, rank: int, timeout: timedelta, host: str) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, 2, options)


_GROUPS = {"gloo": _gloo, "nccl": _nccl}


class PairGroup:
    """One end of a connected group, its threads and its staging buffers. `open` makes one."""

    def __init__(
        self, name: str, backend: str, group: Any, max_bytes: int, timeout_s: float
    ) -> None:
        self.name = name
        self.backend = backend
        self.max_bytes = max_bytes
        self.depth = DEPTHS[backend]
        self.ended = asyncio.Event()
        self._group: Any | None = group
        self._tags = itertools.count(1)
        self._timeout = timedelta(seconds=timeout_s)
        self._threads = ThreadPoolExecutor(self.depth, f"kv-{backend}")
        self._buffers: asyncio.Queue[Tensor] = asyncio.Queue()
        device = "cuda" if backend == "nccl" else "cpu"
        for _ in range(self.depth):
            self._buffers.put_nowait(
                torch.empty(max_bytes + CHECKSUM_BYTES, dtype=torch.uint8, device=device)
            )

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
        return self.depth * self.max_bytes

    def next_tag(self) -> int:
        return next(self._tags)

    async def take(self) -> Tensor:
        return await self._buffers.get()

    def give(self, buffer: Tensor) -> None:
        self._buffers.put_nowait(buffer)

    def start(self, work: Callable[[], None]) -> "asyncio.Future[None]":
        """Runs `send` or `receive` and what belongs to it in a thread of the group. Buffers
        belong to the thread until it is done."""
        if self._group is None:
            raise TransportFailed("the group is closed")
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        running.add_done_callback(self._notice)
        return running

    def send(self, message: Tensor, tag: int) -> None:
        self._transfer("send", message, RECEIVER, tag)

    def receive(self, room: Tensor, tag: int) -> None:
        self._transfer("recv", room, SENDER, tag)

    def _transfer(self, verb: str, tensor: Tensor, peer: int, tag: int) -> None:
        group = self._group
        if group is None:
            raise TransportFailed("the group is closed")
        try:
            getattr(group, verb)([tensor], peer, tag).wait(self._timeout)
            if tensor.is_cuda:
                torch.cuda.current_stream().synchronize()
        except RuntimeError as error:
            raise TransportFailed(f"{self.backend} {verb}: {error}") from error

    def _notice(self, work: "asyncio.Future[None]") -> None:
        if work.cancelled() or isinstance(work.exception(), TransportFailed):
            self.ended.set()

    def close(self) -> None:
        """Operations still running keep the connection until they end or time out."""
        self.ended.set()
        self._group = None
        self._threads.shutdown(wait=False)


class TorchLink:
    """A `PayloadLink` over one group."""

    frame_bytes = FRAME_BYTES
    owns_payloads = True

    def __init__(self, group: PairGroup, timeout_s: float) -> None:
        self.name = f"torch:{group.backend}"
        self.depth = group.depth
        self._group = group
        self._timeout_s = timeout_s

    async def load(self, reader: BlockReader, plan: FramePlan, sequence: int) -> Shipment:
        group, size = self._group, reader.num_bytes(plan)
        if group.ended.is_set() or size > group.max_bytes:
            raise TransportFailed("the group is closed or its messages are shorter")
        buffer, tag = await _buffer_of(group, self._timeout_s), group.next_tag()
        length = size + CHECKSUM_BYTES * reader.checksums

        def fill() -> Tensor:
            checksum = reader.read(plan, buffer[:size])
            if checksum is not None:
                trailer = bytearray(checksum.to_bytes(CHECKSUM_BYTES, "little"))
                buffer[size:length] = torch.frombuffer(trailer, dtype=torch.uint8)
            return buffer[:length]

        try:
            sending = group.start(lambda: group.send(fill(), tag))
        except TransportFailed:
            group.give(buffer)
            raise
        message = TorchMessage(group.name, tag, size, reader.checksums)
        return Shipment(message, None, lambda: _after(sending, lambda: group.give(buffer)), sending)


async def _buffer_of(group: PairGroup, timeout_s: float) -> Tensor:
    try:
        async with asyncio.timeout(timeout_s):
            return await group.take()
    except TimeoutError:
        raise TransportFailed(f"no buffer became free for {timeout_s} s") from None


def _after(work: asyncio.Future, function: Callable[[], None]) -> None:
    """A buffer is free only when the thread that uses it has ended, even if nobody waits."""

    def finish(future: asyncio.Future) -> None:
        if not future.cancelled():
            future.exception()  # seen; whoever waited for it has been told
        function()

    work.add_done_callback(finish)


class TorchInbox:
    """The receiver's groups: at most `limit`, each as long as its sender's call."""

    def __init__(self, host: str, device: str, limit: int, timeout_s: float) -> None:
        self._host = host
        self._backends = backends(device)
        self._limit = limit
        self._timeout_s = timeout_s
        self._groups: dict[str, asyncio.Task[PairGroup]] = {}

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def num_bytes(self) -> int:
        return sum(group.num_bytes for group in self._connected())

    @contextlib.asynccontextmanager
    async def member(self, backend: str, max_bytes: int, store: dist.Store) -> AsyncIterator[str]:
        """Joins a new group on a store that it shares with its peer, while the context is open;
        its name."""
        if backend not in self._backends or not 0 < max_bytes <= MAX_FRAME_BYTES:
            raise ValueError(f"no group of {backend!r} with messages of {max_bytes} bytes here")
        if len(self._groups) >= self._limit:
            raise TransportFailed(f"there are {self._limit} groups already")
        name = secrets.token_hex(8)
        opening = PairGroup.open(
            store, name, RECEIVER, backend, max_bytes, self._host, self._timeout_s
        )
        task = self._groups[name] = asyncio.create_task(opening)
        try:
            yield name
        finally:
            del self._groups[name]
            task.add_done_callback(_close)

    async def ended(self, name: str) -> None:
        """Returns when the group has not come about or an operation in it has failed."""
        try:
            group = await asyncio.shield(self._groups[name])
        except TransportFailed:
            return
        await group.ended.wait()

    async def take(
        self, message: TorchMessage, write: Callable[[Tensor, int | None], None]
    ) -> None:
        """Hands the payload and its checksum to `write`, in the thread that receives it. Raises
        TransportFailed, or what `write` raises."""
        task = self._groups.get(message.group)
        if task is None:
            raise TransportFailed("the group is unknown or closed")
        group = await asyncio.shield(task)
        if not 0 < message.size <= group.max_bytes:
            raise TransportFailed(f"{message.size} bytes are more than the group's messages")
        buffer = await _buffer_of(group, self._timeout_s)
        length = message.size + CHECKSUM_BYTES * message.has_checksum
        room = buffer if group.backend == "gloo" else buffer[:length]

        def receive() -> None:
            group.receive(room, message.tag)
            trailer = buffer[message.size : length].cpu().numpy().tobytes()
            checksum = int.from_bytes(trailer, "little") if message.has_checksum else None
            write(buffer[: message.size], checksum)

        try:
            receiving = group.start(receive)
        except TransportFailed:
            group.give(buffer)
            raise
        _after(receiving, lambda: group.give(buffer))
        await asyncio.shield(receiving)

    def _connected(self) -> list[PairGroup]:
        done = (t for t in self._groups.values() if t.done() and not t.cancelled())
        return [task.result() for task in done if task.exception() is None]


def _close(opening: "asyncio.Task[PairGroup]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
