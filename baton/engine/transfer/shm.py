"""KV blocks that the receiver copies straight out of the sender's cache, on one host.

The sender's whole cache lies in one anonymous memory file (memfd): computing KV is what writes
it. The file has no name, so it is gone with the last process that holds it, whatever dies. A
receiver maps it read-only through /proc/PID/fd/FD, which only the same user may open, after
comparing a random token, and copies the blocks that a frame names into its own. One copy, and
no sender ever writes into memory of a receiver. The sender keeps the blocks until the receiver
has acknowledged them or can no longer commit them.
"""

import asyncio
import contextlib
import fcntl
import mmap
import os
import secrets
import stat
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch

from baton.engine.transfer.base import (
    BlockReader,
    SharedBlocks,
    Shipment,
    ShmBlocks,
    TransportFailed,
)
from baton.engine.transfer.offload import copying
from baton.engine.transfer.plan import FramePlan

_PAGE = mmap.PAGESIZE
_TOKEN_BYTES = 16
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
FRAME_BYTES = 32 << 20
"""A frame costs a message and no memory, so it may be long."""


def host_id() -> str:
    """Equal in two processes that can see each other's memory files."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{os.getuid()}"


def supported() -> bool:
    return hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")


class SharedMemory:
    """The sender's memory file: a page with the token, then `bytes`, zeros that become resident
    when first written. It lives as long as `bytes` does."""

    def __init__(self, num_bytes: int) -> None:
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(self._fd, 0o600)
        os.ftruncate(self._fd, _PAGE + num_bytes)
        # A receiver that maps it can never be killed by a shorter file.
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        memory = mmap.mmap(self._fd, _PAGE + num_bytes)
        memory[:_TOKEN_BYTES] = self._token
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)[_PAGE:]

    def name(self, num_blocks: int, blocks: tuple[int, ...]) -> ShmBlocks:
        """Blocks of the cache of `num_blocks` blocks that lies in it."""
        return ShmBlocks(os.getpid(), self._fd, self._token, num_blocks, blocks)

    def close(self) -> None:
        """Nobody can map it any more. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class ShmLink:
    """A `PayloadLink` that only says where the blocks are."""

    name = "shm"
    frame_bytes = FRAME_BYTES
    depth = 3
    owns_payloads = False

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    async def load(self, reader: BlockReader, plan: FramePlan, sequence: int) -> Shipment:
        checksum = await copying(reader.num_bytes(plan), reader.checksum, plan)
        return Shipment(self._memory.name(reader.num_blocks, reader.blocks(plan)), checksum)


class SharedPools:
    """The receiver's mappings, at most `limit`; one is dropped when its process ends."""

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._maps: OrderedDict[tuple[int, int, bytes], tuple[np.ndarray, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._maps)

    @property
    def num_bytes(self) -> int:
        return sum(mapping.nbytes for mapping, _ in self._maps.values())

    def find(self, blocks: ShmBlocks) -> SharedBlocks:
        """The blocks where they lie. Raises TransportFailed. Keeps the mapping alive."""
        key = (blocks.pid, blocks.fd, blocks.token)
        if key not in self._maps:
            self._add(key)
        self._maps.move_to_end(key)
        return SharedBlocks(self._maps[key][0], blocks.num_blocks, blocks.blocks)

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
            mapping = np.frombuffer(_map(*key), dtype=np.uint8)[_PAGE:]
        except (OSError, ValueError) as error:
            os.close(pidfd)
            raise TransportFailed(f"the memory of process {key[0]}: {error}") from error
        self._maps[key] = mapping, pidfd
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
