"""The hand-off of one prompt's KV from prefill to decode: its verbs, frames and errors.

Sender verbs, in order: `open`, `send` any number of times, then `commit`; or `abort` at any
time. Receiver verbs mirror them: `expect`, `write` and `applied` for each frame, `commit`, `abort`.
States of a hand-off: open → (frames) → committed | aborted. A receiver refuses whatever
does not fit the state, the reservation or the layout; after `abort` or a refusal none of
the KV counts.

What is said (open, frame headers, commit, acknowledgements) always goes in order over one
control stream. Only payloads travel by a transport: a `PayloadLink` loads a frame's payload
into a `Carrier` at the sender, or says where it lies, and the receiver reads it from there. So a
frame can be sent again by another transport, and no transport can change what a frame means.
"""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from baton.engine.kv_layout import KVLayout
from baton.engine.sequence import FinishReason, SampledToken
from baton.engine.transfer.plan import FramePlan

MAX_FRAME_BYTES = 16 << 20
"""No transport carries a longer payload."""


class HandoffError(Exception):
    """A hand-off failed; none of its KV counts."""


class HandoffRefused(HandoffError):
    """The receiver will not take it: unknown, late or foreign, or the layouts differ."""


class HandoffDamaged(HandoffError):
    """Bytes or frames were lost, repeated or changed on the way."""


class HandoffLost(HandoffError):
    """The other side is gone or did not answer in time."""


class TransportFailed(Exception):
    """This transport does not carry the payload; another one may."""


@dataclass(frozen=True)
class ShmBlocks:
    """A payload that lies in the blocks of a cache of `num_blocks` blocks, in the memory file
    `fd` of process `pid`."""

    pid: int
    fd: int
    token: bytes
    num_blocks: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class TorchMessage:
    """A payload sent in a torch.distributed group of two: one message, or as many as the plan is
    cut into by the group's longest."""

    group: str
    tag: int
    """Of the first; the others follow."""
    size: int
    """Of all, without the checksums."""
    has_checksum: bool
    """Each ends with the XXH3-64 of its rest, little-endian."""


@dataclass(frozen=True)
class SharedBlocks:
    """`ShmBlocks` as the receiver sees them: `memory` is the bytes of the sender's whole cache."""

    memory: np.ndarray
    num_blocks: int
    blocks: tuple[int, ...]


Buffer = bytes | bytearray | memoryview
Carrier = Buffer | ShmBlocks | TorchMessage
Payload = Buffer | Tensor | SharedBlocks


@dataclass(frozen=True)
class Shipment:
    """A payload on its way; `release` once it is acknowledged or given up. A carrier of bytes is
    the frame's whole message. `sending` ends with the transport's own work, if it has any."""

    carrier: ShmBlocks | TorchMessage | bytes
    checksum: int | None = None
    release: Callable[[], None] = lambda: None
    sending: "asyncio.Future[None] | None" = None


class BlockReader(Protocol):
    """Where a sender's payloads come from."""

    layout: KVLayout
    """Of the cache that `blocks` count in."""
    num_blocks: int
    checksums: bool
    """Whether payloads have a checksum."""

    def num_bytes(self, plan: FramePlan) -> int: ...

    def read(self, plan: FramePlan, out: Tensor) -> int | None:
        """Copies the planned part into `out`, flat bytes; its checksum if there is one."""

    def blocks(self, plan: FramePlan) -> tuple[int, ...]:
        """Where in the cache the planned part lies."""

    def checksum(self, plan: FramePlan) -> int | None:
        """As `read` returns it, from where the bytes lie."""


class PayloadLink(Protocol):
    """The sender's end of one transport to one receiver."""

    name: str
    frame_bytes: int
    """Longest payload."""
    depth: int
    """Payloads of one hand-off that may be unacknowledged."""
    owns_payloads: bool
    """What is shipped never changes, so the commit may follow unacknowledged frames. Not so when
    the receiver reads blocks that the sender may give away."""

    async def load(self, reader: BlockReader, plan: FramePlan, sequence: int) -> Shipment:
        """Waits for room; raises TransportFailed."""


@dataclass(frozen=True)
class FirstToken:
    """The token that prefill drew for one choice. A choice with a reason goes no further."""

    choice: int
    token: SampledToken
    index: int
    """Its position in the choice's output."""
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Commit:
    """The last frame: how many frames there were, and where each choice stands."""

    num_frames: int
    first_tokens: tuple[FirstToken, ...]


class KVSender(Protocol):
    """Prefill's end."""

    block_size: int
    """Tokens per block of the hand-off, a divisor of both ends' own."""
    held: Collection[int]
    """Positions of blocks that the receiver already has."""
    num_frames: int
    bytes_sent: int
    transport: str
    """What carried the last payload."""

    def open(self) -> None:
        """Connects, so that the first frame finds the way open. Optional, idempotent."""

    async def send(self, plan: FramePlan) -> None:
        """Ships blocks whose KV is complete and stays so until `commit` or `abort` is over.
        Returns when there is room for the next frame (back-pressure)."""

    async def commit(self, first_tokens: tuple[FirstToken, ...]) -> None:
        """Returns when the receiver has applied all frames and the commit."""

    async def abort(self) -> None:
        """Tells the receiver to forget it. Idempotent; without effect after `commit`."""


class FrameRoom(Protocol):
    """Where an expected frame lands, as a whole or part by part."""

    @property
    def plan(self) -> FramePlan: ...

    @property
    def work(self) -> int:
        """Of writing it, in bytes copied."""

    def num_bytes(self, part: FramePlan) -> int: ...

    def write(self, part: FramePlan, payload: Payload, checksum: int | None) -> None:
        """Copies and verifies a payload; in any thread. It is [layer, plane, block, block_size,
        kv_head, head_dim], little-endian; the checksum, if the sender made one, is its XXH3-64.
        Raises HandoffError."""


class KVReceiver(Protocol):
    """Decode's end, on the event loop. All verbs raise HandoffError."""

    def expect(self, sequence: int, plan: FramePlan) -> FrameRoom:
        """A header came: books its layers and blocks. Sequences count from 0 without gaps."""

    def applied(self, sequence: int) -> None:
        """The write of the oldest expected frame has ended."""

    def expect_again(self, sequence: int) -> None:
        """That frame and all later ones will come again, another way."""

    def commit(self, commit: Commit) -> None:
        """After the last frame is applied."""

    def abort(self) -> None:
        """Idempotent; without effect after `commit`."""
