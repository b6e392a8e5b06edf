"""Payloads as messages of torch.distributed groups of two, one for each sender and receiver.

A frame goes as several messages, each with its checksum: one travels while the next is gathered.
The backend is a string: "gloo" or "nccl". See `pair_group` for the groups themselves.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from baton.engine.transfer.base import (
    BlockReader,
    FrameRoom,
    HandoffDamaged,
    Shipment,
    TorchMessage,
    TransportFailed,
)
from baton.engine.transfer.pair_group import CHECKSUM_BYTES, RECEIVER, Lane, PairGroup
from baton.engine.transfer.plan import FramePlan

FRAME_BYTES = 32 << 20
"""A frame costs a header, an acknowledgement and no memory, so it may be long."""
MESSAGE_BYTES = 4 << 20
MAX_MESSAGE_BYTES = 8 << 20
"""The longest for which a receiver makes room."""


def backends(device: str) -> list[str]:
    """What a cache on this device can use, best first."""
    if not dist.is_available():
        return []
    nccl = device == "cuda" and dist.is_nccl_available()
    return ["nccl"] if nccl else ["gloo"] * (device == "cpu" and dist.is_gloo_available())


class TorchLink:
    """A `PayloadLink` over one group."""

    frame_bytes = FRAME_BYTES
    owns_payloads = True

    def __init__(self, group: PairGroup, timeout_s: float) -> None:
        self.name = f"torch:{group.backend}"
        self.depth = group.depth
        self._group = group
        self._timeout_s = timeout_s

    def uses(self, group: PairGroup | None) -> bool:
        return group is self._group

    async def load(self, reader: BlockReader, plan: FramePlan, sequence: int) -> Shipment:
        group = self._group
        parts = group.parts(plan, reader.num_bytes)
        if group.ended.is_set():
            raise TransportFailed("the group is closed")
        lane, tag = await _lane_of(group, self._timeout_s), group.next_tag(len(parts))
        fills = [partial(_fill, reader, part) for part in parts]
        try:
            sending = group.start(lambda: group.send(lane, tag, fills))
        except TransportFailed:
            group.give(lane)
            raise
        message = TorchMessage(group.name, tag, reader.num_bytes(plan), reader.checksums)
        return Shipment(message, None, lambda: _after(sending, lambda: group.give(lane)), sending)


def _fill(reader: BlockReader, part: FramePlan, buffer: Tensor) -> Tensor:
    size = reader.num_bytes(part)
    checksum = reader.read(part, buffer[:size])
    if checksum is None:
        return buffer[:size]
    message = buffer[: size + CHECKSUM_BYTES]
    trailer = bytearray(checksum.to_bytes(CHECKSUM_BYTES, "little"))
    if message.is_cuda:
        message[size:] = torch.frombuffer(trailer, dtype=torch.uint8)
    else:
        message.numpy().data[size:] = trailer
    return message


async def _lane_of(group: PairGroup, timeout_s: float) -> Lane:
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
        if backend not in self._backends or not 0 < max_bytes <= MAX_MESSAGE_BYTES:
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

    async def take(self, message: TorchMessage, frame: FrameRoom) -> None:
        """Writes the payload, in the thread that receives it. Raises TransportFailed or
        HandoffError."""
        task = self._groups.get(message.group)
        if task is None:
            raise TransportFailed("the group is unknown or closed")
        group = await asyncio.shield(task)
        expected = frame.num_bytes(frame.plan)
        if message.size != expected:
            raise HandoffDamaged(f"a frame came as {message.size} bytes, {expected} expected")
        parts = group.parts(frame.plan, frame.num_bytes)
        trailer = CHECKSUM_BYTES * message.has_checksum
        lengths = [frame.num_bytes(part) + trailer for part in parts]
        lane = await _lane_of(group, self._timeout_s)

        def write(number: int, came: Tensor) -> None:
            size, checksum = lengths[number] - trailer, None
            if message.has_checksum:
                checksum = int.from_bytes(came[size:].cpu().numpy().tobytes(), "little")
            frame.write(parts[number], came[:size], checksum)

        try:
            receiving = group.start(lambda: group.receive(lane, message.tag, lengths, write))
        except TransportFailed:
            group.give(lane)
            raise
        _after(receiving, lambda: group.give(lane))
        await asyncio.shield(receiving)

    def _connected(self) -> list[PairGroup]:
        done = (t for t in self._groups.values() if t.done() and not t.cancelled())
        return [task.result() for task in done if task.exception() is None]


def _close(opening: "asyncio.Task[PairGroup]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
