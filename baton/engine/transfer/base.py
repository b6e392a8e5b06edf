"""The hand-off of one prompt's KV from prefill to decode: its verbs, frames and errors.

Sender verbs, in order: `send` any number of frames, then `commit`; or `abort` at any time.
Receiver verbs mirror them: `receive`, `commit`, `abort`.
States of a hand-off: open → (frames) → committed | aborted. A receiver refuses whatever
does not fit the state, the reservation or the layout; after `abort` or a refusal none of
the KV counts. What transport carries the verbs is not known here.
"""

from dataclasses import dataclass
from typing import Protocol

from baton.engine.sequence import FinishReason, SampledToken


class HandoffError(Exception):
    """A hand-off failed; none of its KV counts."""


class HandoffRefused(HandoffError):
    """The receiver will not take it: unknown, late or foreign, or the layouts differ."""


class HandoffDamaged(HandoffError):
    """Bytes or frames were lost, repeated or changed on the way."""


class HandoffLost(HandoffError):
    """The other side is gone or did not answer in time."""


@dataclass(frozen=True)
class KVFrame:
    """(layer range x blocks) of one prompt. `positions` count blocks of the prompt from 0,
    ascending; `payload` is [layer, 2, block, block_size, kv_head, head_dim], little-endian."""

    sequence: int
    layer_start: int
    layer_count: int
    positions: tuple[int, ...]
    payload: bytes | bytearray | memoryview
    checksum: int
    """XXH3-64 of the payload."""


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

    async def send(self, frame: KVFrame) -> None:
        """Returns when the link has taken the frame (back-pressure)."""

    async def commit(self, commit: Commit) -> None:
        """Returns when the receiver has applied the commit."""

    async def abort(self) -> None:
        """Tells the receiver to forget it. Idempotent; without effect after `commit`."""


class KVReceiver(Protocol):
    """Decode's end."""

    async def receive(self, frame: KVFrame) -> None: ...

    async def commit(self, commit: Commit) -> None: ...

    async def abort(self) -> None: ...
