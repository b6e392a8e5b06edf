"""A hand-off inside one process: the sender calls the receiver. For tests and offline use."""

import torch

from baton.engine.transfer.base import BlockReader, Commit, FirstToken, KVFrame, KVReceiver
from baton.engine.transfer.plan import DEFAULT_FRAME_BYTES, FramePlan


class LocalSender:
    """A `KVSender` whose link is a function call."""

    transport = "local"
    frame_bytes = DEFAULT_FRAME_BYTES

    def __init__(self, reader: BlockReader, receiver: KVReceiver) -> None:
        self.num_frames = 0
        self.bytes_sent = 0
        self._reader = reader
        self._receiver = receiver
        self._committed = False

    async def send(self, plan: FramePlan) -> None:
        payload = torch.empty(self._reader.num_bytes(plan), dtype=torch.uint8)
        checksum = self._reader.read(plan, payload)
        where = (self.num_frames, plan.layer_start, plan.layer_count, plan.positions)
        await self._receiver.receive(KVFrame(*where, payload, checksum))
        self.num_frames += 1
        self.bytes_sent += payload.numel()

    async def commit(self, first_tokens: tuple[FirstToken, ...]) -> None:
        await self._receiver.commit(Commit(self.num_frames, first_tokens))
        self._committed = True

    async def abort(self) -> None:
        if not self._committed:
            await self._receiver.abort()
