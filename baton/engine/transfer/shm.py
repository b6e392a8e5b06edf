"""Payloads in memory that sender and receiver of one host both map.

The sender owns one anonymous memory file (memfd) cut into slots; it has no name, so it is
gone with the last process that holds it, whatever dies. The receiver maps it read-only through
/proc/PID/fd/FD after comparing a random token. A slot is written again only after its frame is
acknowledged or its hand-off has failed; the receiver's own blocks are never mapped by a sender.
"""

import asyncio
import contextlib
import fcntl
import mmap
import os
import secrets
import stat
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import torch

from baton.engine.transfer.base import BlockReader, Shipment, ShmSlot, TransportFailed
from baton.engine.transfer.plan import DEFAULT_FRAME_BYTES, FramePlan

_PAGE = mmap.PAGESIZE
_TOKEN_BYTES = 16
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def host_id() -> str:
    """Equal in two processes that can see each other's memory files."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{os.getuid()}"


def supported() -> bool:
    return hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")


class SlotPool:
    """The sender's memory. Pages become resident when first written."""

    def __init__(self, slot_bytes: int = DEFAULT_FRAME_BYTES, num_slots: int = 8) -> None:
        self.slot_bytes = slot_bytes
        self.size = _PAGE + slot_bytes * num_slots
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, self.size)
        # A receiver that maps it can never be killed by a shorter file.
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        self._map = mmap.mmap(self._fd, self.size)
        self._map[:_TOKEN_BYTES] = self._token
        self._memory = torch.frombuffer(self._map, dtype=torch.uint8)
        # Last in, first out: a slot used a moment ago is still in the processor's cache.
        self._free: asyncio.LifoQueue[int] = asyncio.LifoQueue(num_slots)
        for slot in reversed(range(num_slots)):
            self._free.put_nowait(slot)

    @property
    def num_free(self) -> int:
        return self._free.qsize()

    async def take(self) -> int:
        return await self._free.get()

    def give(self, slot: int) -> None:
        self._free.put_nowait(slot)

    def tensor(self, slot: int, size: int) -> torch.Tensor:
        return self._memory[self._offset(slot) :][:size]

    def name(self, slot: int, size: int) -> ShmSlot:
        return ShmSlot(os.getpid(), self._fd, self._token, self._offset(slot), size)

    def close(self) -> None:
        """Receivers keep what they have mapped; nobody can map it anew."""
        os.close(self._fd)

    def _offset(self, slot: int) -> int:
        return _PAGE + slot * self.slot_bytes


class ShmLink:
    """A `PayloadLink` through the process's slots."""

    name = "shm"
    depth = 3

    def __init__(self, pool: SlotPool, timeout_s: float) -> None:
        self.frame_bytes = pool.slot_bytes
        self._pool = pool
        self._timeout_s = timeout_s

    async def load(self, reader: BlockReader, plan: FramePlan) -> Shipment:
        size = reader.num_bytes(plan)
        if size > self.frame_bytes:
            raise TransportFailed(f"{size} bytes do not fit a slot of {self.frame_bytes}")
        try:
            async with asyncio.timeout(self._timeout_s):
                slot = await self._pool.take()
        except TimeoutError:
            raise TransportFailed(f"no slot became free for {self._timeout_s} s") from None
        read = asyncio.ensure_future(
            asyncio.to_thread(reader.read, plan, self._pool.tensor(slot, size))
        )
        try:
            checksum = await asyncio.shield(read)
        except BaseException:
            # The thread may still be writing: the slot is free only after it.
            _when_done(read, lambda: self._pool.give(slot))
            raise
        return Shipment(self._pool.name(slot, size), checksum, lambda: self._pool.give(slot))


def _when_done(work: "asyncio.Future[int | None]", then: Callable[[], None]) -> None:
    def finish(future: "asyncio.Future[int | None]") -> None:
        if not future.cancelled():
            future.exception()  # seen; whoever waited for it has been told
        then()

    work.add_done_callback(finish)


class SlotMaps:
    """The receiver's mappings, at most `limit`; one is dropped when its process ends."""

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._maps: OrderedDict[tuple[int, int, bytes], tuple[mmap.mmap, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._maps)

    @property
    def num_bytes(self) -> int:
        return sum(len(mapping) for mapping, _ in self._maps.values())

    def view(self, slot: ShmSlot) -> memoryview:
        """The payload where it lies. Raises TransportFailed. Keeps the mapping alive."""
        key = (slot.pid, slot.fd, slot.token)
        if key not in self._maps:
            self._add(key)
        self._maps.move_to_end(key)
        mapping, _ = self._maps[key]
        if not _PAGE <= slot.offset <= slot.offset + slot.size <= len(mapping):
            raise TransportFailed(f"bytes [{slot.offset}, +{slot.size}) are outside the memory")
        return memoryview(mapping)[slot.offset : slot.offset + slot.size]

    def close(self) -> None:
        for key in list(self._maps):
            self._drop(key)

    def _add(self, key: tuple[int, int, bytes]) -> None:
        while len(self._maps) >= self._limit:
            self._drop(next(iter(self._maps)))
        try:
            pidfd = os.pidfd_open(key[0])
        except OSError as error:
            raise TransportFailed(f"process {key[0]} is not here: {error}") from error
        try:
            self._maps[key] = _map(*key), pidfd
        except (OSError, ValueError) as error:
            os.close(pidfd)
            raise TransportFailed(f"the memory of process {key[0]}: {error}") from error
        asyncio.get_running_loop().add_reader(pidfd, self._drop, key)

    def _drop(self, key: tuple[int, int, bytes]) -> None:
        # Not closed: the memory goes when the last view of it does.
        _, pidfd = self._maps.pop(key)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)


def _map(pid: int, fd: int, token: bytes) -> mmap.mmap:
    path = f"/proc/{pid}/fd/{fd}"
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("the descriptor is not a memory file")
    mine = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if fcntl.fcntl(mine, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError("its size is not fixed")
        mapping = mmap.mmap(mine, 0, prot=mmap.PROT_READ)
    finally:
        os.close(mine)
    if len(token) != _TOKEN_BYTES or mapping[:_TOKEN_BYTES] != token:
        raise ValueError("its token is another one")
    return mapping
