"""The Decode and KVTransfer services: protobuf in, protobuf out, errors to statuses."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc

from baton.engine.kv_layout import KVLayout
from baton.engine.transfer.base import Commit, HandoffDamaged, HandoffRefused, KVFrame
from baton.v1 import common_pb2, decode_pb2_grpc, kv_pb2, kv_pb2_grpc
from baton.v1 import decode_pb2 as pb
from baton.worker.faults import status_of_faults
from baton.worker.status import WorkerStatus
from baton.worker.translate import (
    continuation_of,
    first_token_from_pb,
    layout_difference,
    output_to_pb,
    prompt_from_pb,
    sampling_from_pb,
)
from decode_service.worker import DecodeWorker, Done, Event, GenerateJob, Reserved


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    def __init__(self, worker: DecodeWorker, status: WorkerStatus, vocab_size: int) -> None:
        self._worker = worker
        self._status = status
        self._vocab_size = vocab_size

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        async with (
            status_of_faults(context, request.request_id),
            aclosing(self._worker.generate(self._job(request))) as events,
        ):
            async for event in events:
                await context.write(self._to_pb(event))

    async def StopChoice(
        self, request: pb.StopChoiceRequest, context: grpc.aio.ServicerContext
    ) -> pb.StopChoiceResponse:
        stopped = self._worker.stop_choice(request.reservation_id, request.choice)
        return pb.StopChoiceResponse(stopped=stopped)

    def _job(self, request: pb.GenerateRequest) -> GenerateJob:
        sampling = sampling_from_pb(request.sampling, self._vocab_size)
        output, choice = continuation_of(request, sampling, self._vocab_size)
        return GenerateJob(
            prompt=prompt_from_pb(request.prompt_token_ids, self._vocab_size),
            sampling=sampling,
            output=output,
            choice=choice,
            cache_salt=request.cache_salt,
            prefill_here=request.prefill_here,
        )

    def _to_pb(self, event: Event) -> pb.GenerateEvent:
        if isinstance(event, Reserved):
            reservation = common_pb2.Reservation(
                id=event.id,
                generation=0,
                incarnation=self._status.incarnation,
                address=self._status.address,
                held_blocks=event.held_blocks,
                lease_s=event.lease_s,
            )
            return pb.GenerateEvent(reserved=pb.Reserved(reservation=reservation))
        if isinstance(event, Done):
            return pb.GenerateEvent(done=pb.GenerateDone(**vars(event)))
        return pb.GenerateEvent(tokens=pb.Tokens(tokens=[output_to_pb(o) for o in event]))


class KVTransferServicer(kv_pb2_grpc.KVTransferServicer):
    """`frame_timeout_s`: a sender that is silent for longer has lost its hand-off."""

    def __init__(
        self,
        worker: DecodeWorker,
        layout: KVLayout,
        incarnation: str,
        frame_timeout_s: float,
    ) -> None:
        self._worker = worker
        self._layout = layout
        self._incarnation = incarnation
        self._frame_timeout_s = frame_timeout_s

    async def Push(
        self, request_iterator: AsyncIterator[kv_pb2.KVFrame], context: grpc.aio.ServicerContext
    ) -> kv_pb2.KVPushResponse:
        async with status_of_faults(context, "push"):
            opening = await self._next(request_iterator)
            self._check(opening)
            open_frame = opening.open
            async with self._worker.receive(
                open_frame.reservation_id, open_frame.generation
            ) as handoff:
                frame = await self._next(request_iterator)
                while frame.WhichOneof("frame") == "data":
                    await handoff.receive(_frame_from_pb(frame.data))
                    frame = await self._next(request_iterator)
                if frame.WhichOneof("frame") != "commit":
                    raise HandoffDamaged("a second opening frame came before the commit")
                await handoff.commit(_commit_from_pb(frame.commit))
            return kv_pb2.KVPushResponse(
                blocks_received=handoff.blocks_received, bytes_received=handoff.bytes_received
            )

    def _check(self, frame: kv_pb2.KVFrame) -> None:
        if frame.WhichOneof("frame") != "open":
            raise HandoffDamaged("the first frame does not open a hand-off")
        if frame.open.incarnation != self._incarnation:
            raise HandoffRefused("the reservation belongs to an earlier life of this worker")
        difference = layout_difference(self._layout, frame.open.layout)
        if difference:
            raise HandoffRefused(f"the KV caches do not match: {difference}")

    async def _next(self, frames: AsyncIterator[kv_pb2.KVFrame]) -> kv_pb2.KVFrame:
        try:
            async with asyncio.timeout(self._frame_timeout_s):
                return await anext(frames)
        except StopAsyncIteration:
            raise HandoffDamaged("the sender ended before its commit") from None
        except TimeoutError:
            raise HandoffDamaged(f"the sender was silent for {self._frame_timeout_s} s") from None


def _frame_from_pb(data: kv_pb2.KVData) -> KVFrame:
    return KVFrame(
        data.sequence,
        data.layer_start,
        data.layer_count,
        tuple(data.blocks),
        data.payload,
        data.checksum,
    )


def _commit_from_pb(commit: kv_pb2.KVCommit) -> Commit:
    firsts = tuple(first_token_from_pb(token) for token in commit.first_tokens)
    return Commit(commit.num_frames, firsts)
