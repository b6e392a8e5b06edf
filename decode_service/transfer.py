"""The KVTransfer service: checks who pushes what, then leaves the frames to `Receiving`."""

import asyncio
from collections.abc import AsyncIterator

import grpc

from baton.engine.kv_layout import KVLayout
from baton.engine.transfer.base import HandoffDamaged, HandoffRefused, TransportFailed
from baton.v1 import kv_pb2
from baton.worker import kv_wire
from baton.worker.faults import status_of_faults
from baton.worker.rendezvous import Rendezvous
from baton.worker.translate import handoff_block_size
from decode_service.inbox import Inbox
from decode_service.receiving import FrameReader, Receiving
from decode_service.worker import DecodeWorker


class KVTransferServicer:
    def __init__(
        self,
        worker: DecodeWorker,
        inbox: Inbox,
        layout: KVLayout,
        incarnation: str,
        frame_timeout_s: float,
    ) -> None:
        self._worker = worker
        self._inbox = inbox
        self._layout = layout
        self._incarnation = incarnation
        self._frame_timeout_s = frame_timeout_s

    def add_to(self, server: grpc.aio.Server) -> None:
        """As the generated function does, but payloads stay where gRPC put them."""
        push = grpc.stream_stream_rpc_method_handler(
            self.Push, kv_wire.parse, kv_pb2.KVAck.SerializeToString
        )
        join = grpc.stream_stream_rpc_method_handler(
            self.Join, kv_pb2.JoinRequest.FromString, kv_pb2.JoinResponse.SerializeToString
        )
        service = grpc.method_handlers_generic_handler(
            "baton.v1.KVTransfer", {"Push": push, "Join": join}
        )
        server.add_generic_rpc_handlers((service,))

    async def Push(
        self, frames: AsyncIterator[kv_wire.WireFrame], context: grpc.aio.ServicerContext
    ) -> None:
        async with status_of_faults(context, "push"):
            reader = FrameReader(frames, self._frame_timeout_s)
            try:
                await self._receive(reader, context)
            except (HandoffRefused, HandoffDamaged):
                await context.write(kv_pb2.KVAck(refused=True))
                await reader.drain()
                raise
            finally:
                reader.close()

    async def _receive(self, reader: FrameReader, context: grpc.aio.ServicerContext) -> None:
        opening = (await reader.next()).message
        self._check(opening)
        reservation = self._worker.reservation(opening.open.reservation_id, opening.open.secret)
        block_size = handoff_block_size(opening.open.layout, self._layout)
        async with self._worker.receive(
            reservation, opening.open.generation, opening.open.layout.dtype, block_size
        ) as handoff:
            await Receiving(handoff, self._inbox, reader, context.write).run()
        await context.write(
            kv_pb2.KVAck(
                frames=handoff.num_frames,
                committed=True,
                blocks=handoff.blocks_received,
                bytes=handoff.bytes_received,
            )
        )

    async def Join(
        self, requests: AsyncIterator[kv_pb2.JoinRequest], context: grpc.aio.ServicerContext
    ) -> None:
        async with status_of_faults(context, "join"):
            request = await self._first(requests)
            self._worker.reservation(request.reservation_id, request.secret)
            async with Rendezvous(self._inbox.timeout_s) as rendezvous:
                groups = self._inbox.groups
                async with groups.member(
                    request.backend, request.max_bytes, rendezvous.store
                ) as name:
                    await context.write(kv_pb2.JoinResponse(group=name))
                    rendezvous.talk(
                        lambda key: context.write(kv_pb2.JoinResponse(key=key)),
                        (request.key async for request in requests),
                    )
                    # The sender, or its death, ends the call and with it the group.
                    await rendezvous.over(groups.ended(name))

    async def _first(self, requests: AsyncIterator[kv_pb2.JoinRequest]) -> kv_pb2.JoinRequest:
        try:
            async with asyncio.timeout(self._inbox.timeout_s):
                return await anext(requests)
        except (StopAsyncIteration, TimeoutError):
            raise TransportFailed("the caller did not say who it is") from None

    def _check(self, frame: kv_pb2.KVFrame) -> None:
        if frame.WhichOneof("frame") != "open":
            raise HandoffDamaged("the first frame does not open a hand-off")
        if frame.open.incarnation != self._incarnation:
            raise HandoffRefused("the reservation belongs to an earlier life of this worker")
