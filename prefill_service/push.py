"""A `KVSender` over one KVTransfer.Push call: what is said, in order, whatever carries the bytes.

At most `link.depth` frames are unacknowledged, so a slow decode slows prefill. When decode
cannot read a payload where it should be, that frame and all later ones go again by the pair's
next transport. The commit leaves when no transport reads blocks any more, which prefill may then
give away; where decode reads them, when every frame is acknowledged. So nobody commits what was
read too late.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Collection
from dataclasses import dataclass, replace
from typing import NoReturn, Protocol

import grpc

from baton.engine.kv_layout import KVLayout
from baton.engine.transfer.base import (
    BlockReader,
    FirstToken,
    HandoffDamaged,
    HandoffError,
    HandoffLost,
    HandoffRefused,
    PayloadLink,
    Shipment,
    TransportFailed,
)
from baton.engine.transfer.plan import RAW, FramePlan, cut
from baton.v1 import common_pb2, kv_pb2
from baton.worker import kv_wire
from baton.worker.translate import first_token_to_pb, layout_to_pb
from prefill_service.wire_policy import Busy

_ERRORS: dict[grpc.StatusCode, type[HandoffError]] = {
    grpc.StatusCode.FAILED_PRECONDITION: HandoffRefused,
    grpc.StatusCode.DATA_LOSS: HandoffDamaged,
}


class Links(Protocol):
    """The transports of a pair of workers."""

    async def best(self, reservation: common_pb2.Reservation) -> PayloadLink: ...

    def frame_bytes(self, link: PayloadLink) -> int:
        """Of the next payload, at most."""

    def took(self, link: PayloadLink, num_bytes: int, seconds: float) -> None:
        """From a frame's departure, or the last acknowledgement, to its own."""

    def failed(self, link: PayloadLink, reason: str) -> None:
        """It rests for a while; `best` gives another one."""

    def abandoned(self, link: PayloadLink) -> None:
        """A hand-off has ended with payloads that nobody may ever read."""


class Codecs(Protocol):
    """How one hand-off is encoded."""

    def codec_on(self, link: PayloadLink, held: Collection[int]) -> str:
        """Asked once, before the first frame on the link."""

    def moved(self, link: PayloadLink, codec: str, num_bytes: int, seconds: float) -> None:
        """All is committed, and went by this link."""


@dataclass(frozen=True)
class _Frame:
    """Written and not yet acknowledged."""

    plan: FramePlan
    shipment: Shipment
    shipped_at: float


class PushSender:
    """`abort` cancels the call."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        destination: common_pb2.Reservation,
        layout: KVLayout,
        reader: BlockReader,
        links: Links,
        timeout_s: float,
        encoding: Codecs | None = None,
    ) -> None:
        """Without `encoding` blocks travel as they are."""
        self.num_frames = 0
        """Of those written so far; fewer again when some must go another way."""
        self.bytes_sent = 0
        self.transport = ""
        self._push = channel.stream_stream(
            "/baton.v1.KVTransfer/Push", kv_wire.serialize, kv_pb2.KVAck.FromString
        )
        self.block_size = reader.layout.block_size
        ratio = destination.offer.layout.block_size // self.block_size
        self.held: Collection[int] = frozenset(
            block * ratio + part for block in destination.held_blocks for part in range(ratio)
        )
        self._destination = destination
        self._layout = layout
        self._reader = reader
        self._links = links
        self._timeout_s = timeout_s
        self._encoding = encoding
        self._codecs: dict[PayloadLink, str] = {}
        self._call: grpc.aio.StreamStreamCall | None = None
        self._opened = False
        self._link: PayloadLink | None = None
        self._plans: deque[FramePlan] = deque()
        """To be written."""
        self._frames: dict[int, _Frame] = {}
        self._writing: asyncio.Task[None] | None = None
        self._committed = False
        self._refused = False
        self._busy = Busy()
        self._heard = asyncio.Event()
        self._heard_at = 0.0
        self._listening: asyncio.Task[None] | None = None

    @property
    def in_flight_bytes(self) -> int:
        """Of payloads not yet acknowledged."""
        return sum(self._reader.num_bytes(frame.plan) for frame in self._frames.values())

    def open(self) -> None:
        if self._call is None:
            self._call = self._push()
            self._listening = asyncio.create_task(self._listen(self._call))

    async def send(self, plan: FramePlan) -> None:
        link = await self._best_link()
        self._plans.append(replace(plan, codec=self._codec_of(link)))
        self.bytes_sent += self._reader.num_bytes(self._plans[-1])
        await self._ship()

    async def commit(self, first_tokens: tuple[FirstToken, ...]) -> None:
        call = await self._opening()
        tokens = [first_token_to_pb(first) for first in first_tokens]
        while not self._committed:
            await self._ship()
            link = await self._best_link()
            if not link.owns_payloads:
                await self._ship(everything=True)
            await self._read_out(call)
            message = kv_pb2.KVCommit(num_frames=self.num_frames, first_tokens=tokens)
            await self._written(call)
            await self._in_time(call.write(kv_pb2.KVFrame(commit=message)), call)
            while not self._committed and not self._plans:
                await self._wait_heard(call)
        if self._encoding is not None and self._link is not None:
            codec, busy = self._codec_of(self._link), self._busy
            self._encoding.moved(self._link, codec, busy.num_bytes, busy.seconds)

    async def abort(self) -> None:
        for task in filter(None, (self._listening, self._writing)):
            task.cancel()
        if self._call is not None:
            self._call.cancel()
        self._give_up(self._link, [frame.shipment for frame in self._frames.values()])
        self._frames.clear()

    def _give_up(self, link: PayloadLink | None, shipments: list[Shipment]) -> None:
        """Nobody may ever read them."""
        works = [shipment.sending for shipment in shipments]
        if link is not None and any(work and not work.done() for work in works):
            self._links.abandoned(link)
        for shipment in shipments:
            shipment.release()

    async def _ship(self, everything: bool = False) -> None:
        """Writes what is due; then waits for room, or until everything is acknowledged."""
        call = await self._opening()
        while True:
            await self._check_refused(call)
            link = await self._best_link()
            if self._plans and len(self._frames) < link.depth:
                await self._ship_one(link, call)
            elif self._plans or (everything and self._frames):
                await self._wait_heard(call)
            else:
                return

    async def _ship_one(self, link: PayloadLink, call: grpc.aio.StreamStreamCall) -> None:
        self._encode_for(link)
        plan = self._cut(self._plans[0], self._links.frame_bytes(link))
        sequence = self.num_frames
        self._busy.begin(time.monotonic())
        try:
            shipment = await link.load(self._reader, plan, sequence)
        except TransportFailed as failure:
            self._fail_link(link, str(failure))
            return
        try:  # the frame before; this one is written while the next is loaded
            await self._written(call)
            message = kv_wire.message_of(sequence, plan, shipment.carrier, shipment.checksum)
        except BaseException:
            self._give_up(link, [shipment])
            raise
        if link is not self._link:  # it failed meanwhile: another frame is next
            shipment.release()
            return
        self._plans.popleft()
        self.num_frames += 1
        self.transport = link.name
        self._write(call, message)
        self._frames[sequence] = _Frame(plan, shipment, time.monotonic())

    def _codec_of(self, link: PayloadLink) -> str:
        if self._encoding is None:
            return RAW
        if link not in self._codecs:
            self._codecs[link] = self._encoding.codec_on(link, self.held)
        return self._codecs[link]

    def _encode_for(self, link: PayloadLink) -> None:
        """The next plan may have been meant for another link."""
        plan = self._plans[0]
        if plan.codec != self._codec_of(link):
            self._plans[0] = replace(plan, codec=self._codec_of(link))
            change = self._reader.num_bytes(self._plans[0]) - self._reader.num_bytes(plan)
            self.bytes_sent += change

    def _cut(self, plan: FramePlan, max_bytes: int) -> FramePlan:
        """The first frame of a plan; the rest of it comes next."""
        self._plans.popleft()
        self._plans.extendleft(reversed(cut(plan, self._reader.num_bytes, max_bytes)))
        return self._plans[0]

    async def _read_out(self, call: grpc.aio.StreamStreamCall) -> None:
        """Whoever commits may lose the blocks at once, so no transport still reads them."""
        works = [frame.shipment.sending for frame in self._frames.values()]
        if sending := [work for work in works if work is not None]:
            await self._in_time(asyncio.wait(sending), call)

    def _write(self, call: grpc.aio.StreamStreamCall, message: kv_pb2.KVFrame | bytes) -> None:
        """Begins; the next one must wait until it is `_written`."""
        self._writing = asyncio.create_task(call.write(message))
        self._writing.add_done_callback(_seen)

    async def _written(self, call: grpc.aio.StreamStreamCall) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await self._in_time(asyncio.shield(writing), call)

    async def _best_link(self) -> PayloadLink:
        if self._link is None:
            self._link = await self._links.best(self._destination)
        return self._link

    def _fail_link(self, link: PayloadLink, reason: str) -> None:
        if link is self._link:
            self._links.failed(link, reason)
            self._link = None
            self._busy = Busy()

    async def _opening(self) -> grpc.aio.StreamStreamCall:
        self.open()
        call = self._call
        assert call is not None
        if not self._opened:
            self._opened = True
            opening = kv_pb2.KVOpen(
                reservation_id=self._destination.id,
                generation=self._destination.generation,
                incarnation=self._destination.incarnation,
                secret=self._destination.secret,
                layout=layout_to_pb(self._layout),
            )
            self._write(call, kv_pb2.KVFrame(open=opening))
        return call

    async def _listen(self, call: grpc.aio.StreamStreamCall) -> None:
        try:
            async for ack in call:
                self._hear(ack)
        except grpc.aio.AioRpcError:
            return  # whoever waits asks the call for its status
        finally:
            self._heard.set()

    def _hear(self, ack: kv_pb2.KVAck) -> None:
        self._let_go([number for number in self._frames if number < ack.frames])
        if not self._frames:
            self._busy.end(time.monotonic())
        if ack.unreadable and self._link is not None:
            self._fail_link(self._link, ack.unreadable)
            self.num_frames = ack.frames
            self._plans.extendleft(frame.plan for frame in reversed(self._frames.values()))
            for frame in self._frames.values():
                frame.shipment.release()
            self._frames.clear()
        self._committed = ack.committed
        self._refused = self._refused or ack.refused
        self._heard.set()

    def _let_go(self, acknowledged: list[int]) -> None:
        if not acknowledged:
            return
        now, num_bytes = time.monotonic(), 0
        since = max(self._frames[acknowledged[0]].shipped_at, self._heard_at)
        for number in acknowledged:
            frame = self._frames.pop(number)
            frame.shipment.release()
            num_bytes += self._reader.num_bytes(frame.plan)
        self._busy.add(num_bytes)
        if self._link is not None:
            self._links.took(self._link, num_bytes, now - since)
        self._heard_at = now

    async def _wait_heard(self, call: grpc.aio.StreamStreamCall) -> None:
        await self._in_time(self._heard.wait(), call)
        self._heard.clear()
        await self._check_refused(call)
        if call.done() and not self._committed:
            await self._raise_status(call)

    async def _check_refused(self, call: grpc.aio.StreamStreamCall) -> None:
        """Ends our side, which ends the call: its status says why."""
        if self._refused:
            await self._written(call)
            await self._in_time(call.done_writing(), call)
            await self._in_time(call.code(), call)
            await self._raise_status(call)

    async def _in_time(self, step: Awaitable[object], call: grpc.aio.StreamStreamCall) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await step
        except TimeoutError:
            raise HandoffLost(
                f"decode at {self._destination.address} took nothing for {self._timeout_s} s"
            ) from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # A write on a call that has ended says only that; the call's status says why.
            await self._raise_status(call)

    async def _raise_status(self, call: grpc.aio.StreamStreamCall) -> NoReturn:
        code, details = await call.code(), await call.details()
        raise _ERRORS.get(code, HandoffLost)(f"{self._destination.address}: {details or code.name}")


def _seen(writing: "asyncio.Task[None]") -> None:
    """A write that fails when nobody waits for it any more is told by the call's status."""
    if not writing.cancelled():
        writing.exception()
