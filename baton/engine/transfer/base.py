"""The hand-off of one prompt's KV from prefill to decode: its verbs, frames and errors.

Sender verbs, in order: `send` any number of planned frames, then `commit`; or `abort` at any
time. Receiver verbs mirror them: `receive`, `commit`, `abort`.
States of a hand-off: open → (frames) → committed | aborted. A receiver refuses whatever
does not fit the state, the reservation or the layout; after `abort` or a refusal none of
the KV counts.

What is said (open, frame headers, commit, acknowledgements) always goes in order over one
control stream. Only payloads travel by a transport: a `PayloadLink` loads a frame's payload
into a `Carrier` at the sender, and the receiver reads it from there. So a frame can be sent
again by another transport, and no transport can change what a frame means.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

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
class ShmSlot:
    """A payload in the memory file `fd` of process `pid`."""

    pid: int
    fd: int
    token: bytes
    offset: int
    size: int


@dataclass(frozen=True)
class TorchMessage:
    """A payload sent in a torch.distributed group of two."""

    group: str
    tag: int
    size: int


Buffer = bytes | bytearray | memoryview
Carrier = Buffer | ShmSlot | TorchMessage


async def _nothing_to_do() -> None:
    return None


@dataclass(frozen=True)
class Shipment:
    """A loaded payload. `deliver` once its header is on the control stream; `release` once it
    is acknowledged or given up."""

    carrier: Carrier
    checksum: int | None
    release: Callable[[], None] = lambda: None
    deliver: Callable[[], Awaitable[None]] = _nothing_to_do


class BlockReader(Protocol):
    """Where a sender's payloads come from."""

    def num_bytes(self, plan: FramePlan) -> int: ...

    def read(self, plan: FramePlan, out: Tensor) -> int | None:
        """Copies the planned part into `out`, flat bytes; its checksum if there is one."""


class PayloadLink(Protocol):
    """The sender's end of one transport to one receiver."""

    name: str
    frame_bytes: int
    """Longest payload."""
    depth: int
    """Payloads of one hand-off that may be unacknowledged."""

    async def load(self, reader: BlockReader, plan: FramePlan) -> Shipment:
        """Waits for room; raises TransportFailed."""


@dataclass(frozen=True)
class KVFrame:
    """(layer range x blocks) of one prompt. `positions` count blocks of the prompt from 0,
    ascending; `payload` is [layer, 2, block, block_size, kv_head, head_dim], little-endian."""

    sequence: int
    layer_start: int
    layer_count: int
    positions: tuple[int, ...]
    payload: Buffer | Tensor
    checksum: int | None
    """XXH3-64 of the payload, if the sender made one."""


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

    num_frames: int
    bytes_sent: int
    transport: str
    """What carried the last payload."""

    @property
    def frame_bytes(self) -> int:
        """Longest frame to plan."""

    async def send(self, plan: FramePlan) -> None:
        """Ships blocks whose KV is complete and stays so until `commit` or `abort` is over.
        Returns when there is room for the next frame (back-pressure)."""

    async def commit(self, first_tokens: tuple[FirstToken, ...]) -> None:
        """Returns when the receiver has applied all frames and the commit."""

    async def abort(self) -> None:
        """Tells the receiver to forget it. Idempotent; without effect after `commit`."""


class KVReceiver(Protocol):
    """Decode's end."""

    async def receive(self, frame: KVFrame) -> None: ...

    async def commit(self, commit: Commit) -> None: ...

    async def abort(self) -> None: ...
