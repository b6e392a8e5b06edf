"""Hand-offs made by hand: the real sender over any transport, told to misbehave on request."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from baton.engine.sampling_params import SamplingParams
from baton.engine.sequence import SampledToken, Sequence
from baton.engine.transfer.base import FirstToken
from baton.engine.transfer.payload import SequenceReader
from baton.engine.transfer.plan import FramePlan
from baton.v1 import common_pb2
from baton.worker import kv_wire
from prefill_service.push import PushSender
from tests.support.tiny import RunningWorker

FIRST = (FirstToken(0, SampledToken(7), 0),)
LAYERS = 2


class FlippingReader(SequenceReader):
    """Changes a byte of one frame after its checksum was made."""

    flip_at = -1

    def read(self, plan: FramePlan, out: Tensor) -> int | None:
        checksum = super().read(plan, out)
        if plan.positions[0] == self.flip_at:
            out[5] ^= 1
        return checksum

    def checksum(self, plan: FramePlan) -> int | None:
        checksum = super().checksum(plan)
        if plan.positions[0] == self.flip_at:
            self._cache.data[0, 0, self.blocks(plan)[0]] += 1
        return checksum


@contextlib.contextmanager
def lying(lie: Callable[[int, FramePlan], tuple[int, FramePlan]] | None) -> Iterator[None]:
    """Headers of frames say what `lie` makes of (sequence, plan); payloads stay as they are."""
    make = kv_wire._data

    def lie_about(sequence: int, plan: FramePlan, checksum: int | None) -> Any:
        return make(*(lie(sequence, plan) if lie else (sequence, plan)), checksum)

    with mock.patch.object(kv_wire, "_data", lie_about):
        yield


def by_hand(
    prefill: RunningWorker, reservation: common_pb2.Reservation, num_blocks: int, flip_at: int = -1
) -> PushSender:
    """A sender of `num_blocks` blocks of noise from the prefill worker's pool."""
    cache, pairs = prefill.parts.cache, prefill.transfer
    cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(3)))
    seq = Sequence(list(range(3, 3 + 4 * num_blocks)), SamplingParams())
    seq.block_table = list(range(num_blocks))
    reader = FlippingReader(cache, seq)
    reader.flip_at = flip_at
    channel, pair = pairs.channels.get(reservation.address), pairs._pair(reservation)
    sender = PushSender(channel, reservation, cache.layout, reader, pair, 10.0)
    pair.senders.add(sender)
    return sender


def whole_block(position: int) -> FramePlan:
    return FramePlan(0, LAYERS, (position,))


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "the condition never came true"
        await asyncio.sleep(0.005)
