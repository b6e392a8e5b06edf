"""How this worker reaches each decode worker: which transports, which of them rest, and why.

For one pair the order is shared memory (same host), torch.distributed, gRPC; a setting names
one instead. A transport that fails rests for a pause, then is tried again. gRPC never rests.
Owns the sending ends; their number and memory are bounded and reported.
"""

import asyncio
import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Collection
from functools import partial

from baton.cluster.rpc import ChannelPool
from baton.cluster.settings import PrefillSettings
from baton.cluster.workers import WorkerLink
from baton.engine.kv_cache import KVCache
from baton.engine.sequence import Sequence
from baton.engine.transfer import shm, torch_dist
from baton.engine.transfer.base import HandoffRefused, PayloadLink, TransportFailed
from baton.engine.transfer.payload import SequenceReader
from baton.v1 import common_pb2
from baton.worker.activity import TransferResources
from baton.worker.translate import handoff_block_size
from prefill_service.encoding import Encoding
from prefill_service.inline import InlineLink
from prefill_service.push import PushSender
from prefill_service.torch_pair import TorchPair
from prefill_service.wire_policy import Rates, frame_bytes

log = logging.getLogger(__name__)

_MAX_PAIRS = 256
_INLINE_FRAMES = 8
"""Of all pairs, unacknowledged."""
_INLINE_FRAMES_OF_PAIR = 4


class Pairs:
    """All pairs of one prefill worker. Made and used on the event loop."""

    def __init__(
        self,
        settings: PrefillSettings,
        cache: KVCache,
        channels: ChannelPool,
        memory: shm.SharedMemory | None = None,
    ) -> None:
        """`memory`: where the cache lies, if others may map it."""
        self.settings = settings
        self.channels = channels
        self.device = cache.data.device.type
        self.inline_frames = asyncio.Semaphore(_INLINE_FRAMES)
        self._cache = cache
        self.memory = memory
        self._pairs: OrderedDict[str, Pair] = OrderedDict()
        self._computing = Rates()

    def sender(self, destination: common_pb2.Reservation, seq: Sequence) -> PushSender:
        """Before `seq` holds any block: tells it whose blocks it will be shipped in. Raises
        HandoffRefused when the two caches do not match."""
        layout = self._cache.layout
        block_size = handoff_block_size(layout, destination.offer.layout)
        if not seq.kv_policy.is_full and layout.block_size != destination.offer.layout.block_size:
            raise HandoffRefused(f"kv_policy {seq.kv_policy.name} needs blocks of one size")
        theirs = destination.offer.layout.dtype
        if seq.kv_policy.keeps_state and layout.dtype != theirs:
            raise HandoffRefused(
                f"kv_policy {seq.kv_policy.name} needs caches of one dtype, not "
                f"{layout.dtype!r} at prefill and {theirs!r} at decode"
            )
        seq.peer_block_size = max(1, destination.offer.layout.block_size)
        reader = SequenceReader(
            self._cache.in_blocks_of(block_size),
            seq,
            self.settings.kv_checksum,
            layout.block_size // block_size,
        )
        pair, choice = self._pair(destination), self.settings.wire_codec
        sender = PushSender(
            self.channels.get(destination.address),
            destination,
            layout,
            reader,
            pair,
            self.settings.handoff_timeout_s,
            Encoding(
                choice,
                destination.offer,
                reader,
                seq,
                pair.rates,
                self._computing,
                pair.token_bytes,
            ),
        )
        pair.senders.add(sender)
        return sender

    def links(self) -> tuple[WorkerLink, ...]:
        return tuple(pair.link() for pair in self._pairs.values() if pair.transport)

    def resources(self) -> TransferResources:
        groups = [g for pair in self._pairs.values() if (g := pair.torch.group) is not None]
        return TransferResources(
            torch_groups=len(groups),
            shm_bytes=self.memory.bytes.nbytes if self.memory else 0,
            staging_bytes=sum(group.num_bytes for group in groups),
            in_flight_bytes=sum(pair.in_flight_bytes for pair in self._pairs.values()),
        )

    async def close(self) -> None:
        for pair in self._pairs.values():
            pair.torch.close()
        if self.memory is not None:
            self.memory.close()

    def _pair(self, destination: common_pb2.Reservation) -> "Pair":
        pair = self._pairs.get(destination.address)
        if pair is None or pair.incarnation != destination.incarnation:
            if pair is not None:
                pair.torch.close()
            pair = self._pairs[destination.address] = Pair(self, destination)
        self._pairs.move_to_end(destination.address)
        while len(self._pairs) > _MAX_PAIRS:
            self._pairs.popitem(last=False)[1].torch.close()
        return pair


class Pair:
    """`Links` to one life of one decode worker."""

    def __init__(self, pairs: Pairs, destination: common_pb2.Reservation) -> None:
        self.address = destination.address
        self.incarnation = destination.incarnation
        self.transport = ""
        self.rates = Rates()
        self._paces = Rates()
        """Of single frames, by link."""
        self.token_bytes: dict[str, int] = {}
        """That the last hand-off by a link shipped."""
        self.senders = weakref.WeakSet[PushSender]()
        settings = pairs.settings
        self._resting: dict[str, float] = {}
        self._inline = InlineLink(
            pairs.inline_frames, _INLINE_FRAMES_OF_PAIR, settings.handoff_timeout_s
        )
        self._shm = shm.ShmLink(pairs.memory) if pairs.memory else None
        self._order = _order(settings.transports, destination.offer, pairs.device, self._shm)
        self._retry_s = settings.transport_retry_s
        channel = partial(pairs.channels.get, self.address)
        backends = list(destination.offer.torch_backends)
        self.torch = TorchPair(
            channel, self.address, backends, pairs.device, settings.transport_timeout_s
        )

    async def best(self, reservation: common_pb2.Reservation) -> PayloadLink:
        for transport in self._order:
            if self._resting.get(transport, 0.0) > time.monotonic():
                continue
            try:
                link = await self._open(transport, reservation)
            except (TransportFailed, OSError) as error:
                self._rest(transport, str(error))
                continue
            self.transport = link.name
            return link
        self.transport = self._inline.name
        return self._inline

    def frame_bytes(self, link: PayloadLink) -> int:
        return frame_bytes(link.frame_bytes, self._paces.get(link.name, time.monotonic()))

    def took(self, link: PayloadLink, num_bytes: int, seconds: float) -> None:
        self._paces.saw(link.name, num_bytes, seconds, time.monotonic())

    def failed(self, link: PayloadLink, reason: str) -> None:
        self._paces.forget(link.name)
        transport = link.name.partition(":")[0]
        if isinstance(link, torch_dist.TorchLink):
            self.torch.failed(link)
        if transport != "grpc":
            self._rest(transport, reason)

    def abandoned(self, link: PayloadLink) -> None:
        if isinstance(link, torch_dist.TorchLink):
            self.torch.abandoned(link)

    def link(self) -> WorkerLink:
        now = time.monotonic()
        resting = tuple(name for name, until in self._resting.items() if until > now)
        token_bytes = self.token_bytes.get(self.transport, 0)
        return WorkerLink(self.address, self.transport, resting, self.in_flight_bytes, token_bytes)

    @property
    def in_flight_bytes(self) -> int:
        return sum(sender.in_flight_bytes for sender in self.senders)

    def _rest(self, transport: str, reason: str) -> None:
        log.warning("transport=%s peer=%s rests: %s", transport, self.address, reason)
        self._resting[transport] = time.monotonic() + self._retry_s

    async def _open(self, transport: str, reservation: common_pb2.Reservation) -> PayloadLink:
        if transport == "torch":
            return await self.torch.link(reservation)
        return self._shm if transport == "shm" and self._shm else self._inline


def _order(
    choice: Collection[str],
    offer: common_pb2.TransferOffer,
    device: str,
    shm_link: shm.ShmLink | None,
) -> list[str]:
    able = {
        "shm": shm_link is not None and offer.host_id == shm.host_id(),
        "torch": bool(set(torch_dist.backends(device)) & set(offer.torch_backends)),
        "grpc": True,
    }
    offered = [t for t in able if able[t] and (t in offer.transports or t == "grpc")]
    return [t for t in offered if t in (*choice, "grpc")]
