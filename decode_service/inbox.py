"""Where payloads arrive: finds the bytes of a frame wherever its carrier says they are.

Owns the receiving ends of the transports; all are bounded. Knows no reservation: what a frame
means, and whether it is still wanted, is decided elsewhere.
"""

from collections.abc import Collection

from baton.cluster.settings import DecodeSettings
from baton.engine.kv_layout import KVLayout
from baton.engine.transfer import shm, torch_dist
from baton.engine.transfer.base import (
    MAX_FRAME_BYTES,
    Carrier,
    FrameRoom,
    HandoffRefused,
    ShmBlocks,
    TorchMessage,
    TransportFailed,
)
from baton.engine.transfer.offload import copying
from baton.engine.transfer.wire import codecs_of
from baton.v1 import common_pb2
from baton.worker.activity import TransferResources
from baton.worker.translate import layout_to_pb


class Inbox:
    """Made and used on the event loop."""

    def __init__(self, settings: DecodeSettings, layout: KVLayout, device: str = "cpu") -> None:
        self.timeout_s = settings.transport_timeout_s
        self.pools = shm.SharedPools()
        self.groups = torch_dist.TorchInbox(
            _own_host(settings), device, settings.max_torch_groups, settings.transport_timeout_s
        )
        self._transports = _transports(settings.transports, device)
        self._device = device
        self._layout = layout
        self._message_bytes = 0
        """Of payloads that came inside messages and are not yet written."""

    def offer(self) -> common_pb2.TransferOffer:
        return common_pb2.TransferOffer(
            host_id=shm.host_id() if "shm" in self._transports else "",
            transports=self._transports,
            torch_backends=torch_dist.backends(self._device),
            layout=layout_to_pb(self._layout),
            codecs=codecs_of(self._layout),
        )

    async def deliver(self, carrier: Carrier, checksum: int | None, frame: FrameRoom) -> None:
        """Writes the bytes, in a thread if that is much work. Raises TransportFailed, or
        HandoffError also for more bytes than any frame may have."""
        if isinstance(carrier, ShmBlocks):
            self._check_offered("shm")
            blocks = self.pools.find(carrier)
            await copying(frame.work, frame.write, frame.plan, blocks, checksum)
            return
        if isinstance(carrier, TorchMessage):
            self._check_offered("torch")
            await self.groups.take(carrier, frame)
            return
        if (size := len(carrier)) > MAX_FRAME_BYTES:
            raise HandoffRefused(f"a frame of {size} bytes is over the limit {MAX_FRAME_BYTES}")
        self._message_bytes += size
        try:
            await copying(frame.work, frame.write, frame.plan, carrier, checksum)
        finally:
            self._message_bytes -= size

    def resources(self) -> TransferResources:
        return TransferResources(
            len(self.groups), self.pools.num_bytes, self.groups.num_bytes, self._message_bytes
        )

    def close(self) -> None:
        self.pools.close()

    def _check_offered(self, transport: str) -> None:
        if transport not in self._transports:
            raise TransportFailed(f"{transport} is not offered here")


def _own_host(settings: DecodeSettings) -> str:
    return settings.advertised(0).rpartition(":")[0].strip("[]")


def _transports(choice: Collection[str], device: str) -> list[str]:
    able = {"shm": shm.supported(), "torch": bool(torch_dist.backends(device)), "grpc": True}
    return [name for name in able if (able[name] and name in choice) or name == "grpc"]
