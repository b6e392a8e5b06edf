"""Payloads as point-to-point messages of torch.distributed, in groups of two without a world.

The receiver (rank 1) hosts one store; each sender (rank 0) has a group of its own on a prefix
of it. The backend is a string: "gloo" or "nccl". Messages are matched by tags never used twice,
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
            self._buffers.put_nowait(torch.empty(max_bytes, dtype=torch.uint8, device=device))

    @staticmethod
    async def open(
        store: Any, name: str, rank: int, backend: str, max_bytes: int,
        host: str, timeout_s: float,
    ) -> "PairGroup":  # fmt: skip
        """Waits for the other side. Raises TransportFailed."""
        timeout = timedelta(seconds=timeout_s)

        def connect() -> Any:
            # A connection of its own: a wait on it holds up nobody else.
            prefixed = dist.PrefixStore(name, store.clone())
            prefixed.set_timeout(timeout)
            return _GROUPS[backend](prefixed, rank, timeout, host)

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

    def start(self, verb: str, buffer: Tensor, tag: int) -> "asyncio.Future[None]":
        """`verb`: "send" or "recv". The buffer belongs to the operation until it is done."""
        group, peer = self._group, RECEIVER if verb == "send" else SENDER
        if group is None:
            raise TransportFailed("the group is closed")

        def run() -> None:
            try:
                getattr(group, verb)([buffer], peer, tag).wait(self._timeout)
                if buffer.is_cuda:
                    torch.cuda.current_stream().synchronize()
            except RuntimeError as error:
                raise TransportFailed(f"{self.backend} {verb}: {error}") from error

        work = asyncio.get_running_loop().run_in_executor(self._threads, run)
        work.add_done_callback(self._notice)
        return work

    def _notice(self, work: "asyncio.Future[None]") -> None:
        if work.cancelled() or work.exception() is not None:
            self.ended.set()

    def close(self) -> None:
        """Operations still running keep the connection until they end or time out."""
        self.ended.set()
        self._group = None
        self._threads.shutdown(wait=False)


class TorchLink:
    """A `PayloadLink` over one group."""

    def __init__(self, group: PairGroup, timeout_s: float) -> None:
        self.name = f"torch:{group.backend}"
        self.frame_bytes = group.max_bytes
        self.depth = group.depth
        self._group = group
        self._timeout_s = timeout_s

    async def load(self, reader: BlockReader, plan: FramePlan) -> Shipment:
        group, size = self._group, reader.num_bytes(plan)
        if group.ended.is_set() or size > group.max_bytes:
            raise TransportFailed("the group is closed or its messages are shorter")
        buffer = await _buffer_of(group, self._timeout_s)
        message, sending = buffer[:size], _Last()
        sending.follow(asyncio.ensure_future(asyncio.to_thread(reader.read, plan, message)))
        try:
            checksum = await sending.result()
        except BaseException:
            sending.then(lambda: group.give(buffer))
            raise
        tag = group.next_tag()

        async def deliver() -> None:
            sending.follow(group.start("send", message, tag))
            await sending.result()

        return Shipment(
            TorchMessage(group.name, tag, size),
            checksum,
            lambda: sending.then(lambda: group.give(buffer)),
            deliver,
        )


async def _buffer_of(group: PairGroup, timeout_s: float) -> Tensor:
    try:
        async with asyncio.timeout(timeout_s):
            return await group.take()
    except TimeoutError:
        raise TransportFailed(f"no buffer became free for {timeout_s} s") from None


class _Last:
    """The thread that last used a buffer; what follows waits for it even when cancelled."""

    def __init__(self) -> None:
        self._work: asyncio.Future | None = None

    def follow(self, work: asyncio.Future) -> None:
        self._work = work

    async def result(self) -> int | None:
        return None if self._work is None else await asyncio.shield(self._work)

    def then(self, function: Callable[[], None]) -> None:
        def finish(future: asyncio.Future) -> None:
            if not future.cancelled():
                future.exception()  # seen; whoever waited for it has been told
            function()

        if self._work is not None:
            self._work.add_done_callback(finish)


class TorchInbox:
    """The receiver's groups: at most `limit`, each as long as its sender's call."""

    def __init__(self, host: str, device: str, limit: int, timeout_s: float) -> None:
        self._host = host
        self._backends = backends(device)
        self._limit = limit
        self._timeout_s = timeout_s
        self._store: dist.TCPStore | None = None
        self._groups: dict[str, asyncio.Task[PairGroup]] = {}

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def num_bytes(self) -> int:
        return sum(group.num_bytes for group in self._connected())

    @contextlib.asynccontextmanager
    async def member(self, backend: str, max_bytes: int) -> AsyncIterator[tuple[str, int]]:
        """Joins a new group while the context is open; its name, and the store's port."""
        if backend not in self._backends or not 0 < max_bytes <= MAX_FRAME_BYTES:
            raise ValueError(f"no group of {backend!r} with messages of {max_bytes} bytes here")
        if len(self._groups) >= self._limit:
            raise TransportFailed(f"there are {self._limit} groups already")
        if self._store is None:
            self._store = dist.TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        store, name = self._store, secrets.token_hex(8)
        opening = PairGroup.open(
            store, name, RECEIVER, backend, max_bytes, self._host, self._timeout_s
        )
        task = self._groups[name] = asyncio.create_task(opening)
        try:
            yield name, store.port
        finally:
            del self._groups[name]
            task.add_done_callback(_close)
            _forget(store, name)

    async def ended(self, name: str) -> None:
        """Returns when the group has not come about or an operation in it has failed."""
        try:
            group = await asyncio.shield(self._groups[name])
        except TransportFailed:
            return
        await group.ended.wait()

    async def fetch(self, message: TorchMessage) -> tuple[Tensor, Callable[[], None]]:
        """The payload and what gives its buffer back. Raises TransportFailed."""
        task = self._groups.get(message.group)
        if task is None:
            raise TransportFailed("the group is unknown or closed")
        group = await asyncio.shield(task)
        if not 0 < message.size <= group.max_bytes:
            raise TransportFailed(f"{message.size} bytes are more than the group's messages")
        buffer = await _buffer_of(group, self._timeout_s)
        room = buffer if group.backend == "gloo" else buffer[: message.size]
        receiving = _Last()
        try:
            receiving.follow(group.start("recv", room, message.tag))
            await receiving.result()
        except BaseException:
            receiving.then(lambda: group.give(buffer))
            raise
        return buffer[: message.size], lambda: group.give(buffer)

    def _connected(self) -> list[PairGroup]:
        done = (t for t in self._groups.values() if t.done() and not t.cancelled())
        return [task.result() for task in done if task.exception() is None]


def _close(opening: "asyncio.Task[PairGroup]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _forget(store: dist.TCPStore, name: str) -> None:
    for key in store.list_keys():
        if name in key:
            store.delete_key(key)


def connect_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """The receiver's store. Blocks; raises TransportFailed."""
    try:
        timeout = timedelta(seconds=timeout_s)
        return dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        raise TransportFailed(f"the store at {host}:{port} does not answer: {error}") from error
