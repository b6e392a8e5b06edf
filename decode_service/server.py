"""The Decode service: protobuf in, protobuf out, errors to statuses."""

import time
from contextlib import aclosing

import grpc

from baton.v1 import common_pb2, decode_pb2_grpc
from baton.v1 import decode_pb2 as pb
from baton.worker.faults import status_of_faults
from baton.worker.prompt_cache import pins_from_pb
from baton.worker.replies import ReplyStreams
from baton.worker.status import WorkerStatus
from baton.worker.translate import (
    continuation_of,
    due_at,
    output_to_pb,
    prompt_from_pb,
    sampling_from_pb,
    step_to_pb,
    totals_to_pb,
)
from decode_service.inbox import Inbox
from decode_service.worker import DecodeWorker, Done, Event, GenerateJob, Reserved


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    def __init__(
        self,
        worker: DecodeWorker,
        status: WorkerStatus,
        vocab_size: int,
        inbox: Inbox,
        replies: ReplyStreams,
    ) -> None:
        self._worker = worker
        self._status = status
        self._vocab_size = vocab_size
        self._inbox = inbox
        self._replies = replies

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        async with (
            status_of_faults(context, request.request_id),
            aclosing(self._worker.generate(self._job(request))) as events,
        ):
            answer = await self._replies.answers(request, context)
            async for event in events:
                await answer(self._to_pb(event))

    async def StopChoice(
        self, request: pb.StopChoiceRequest, context: grpc.aio.ServicerContext
    ) -> pb.StopChoiceResponse:
        stopped = self._worker.stop_choice(request.reservation_id, request.secret, request.choice)
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
            kv_policy=request.kv_policy,
            due_at=due_at(request, time.monotonic()),
            pins=pins_from_pb(request.pins),
            prefill_here=request.prefill_here,
            max_uncached=(
                request.max_uncached_tokens if request.HasField("max_uncached_tokens") else None
            ),
        )

    def _to_pb(self, event: Event) -> pb.GenerateEvent:
        if isinstance(event, Reserved):
            reservation = common_pb2.Reservation(
                id=event.id,
                secret=event.secret,
                generation=0,
                incarnation=self._status.incarnation,
                address=self._status.address,
                held_blocks=event.held_blocks,
                lease_s=event.lease_s,
                offer=self._inbox.offer(),
            )
            reserved = pb.Reserved(
                reservation=reservation, received_at=event.received_at, sent_at=time.monotonic()
            )
            return pb.GenerateEvent(reserved=reserved)
        if isinstance(event, Done):
            names = ("prefill_steps", "decode_steps")
            totals = {name: totals_to_pb(getattr(event, name)) for name in names}
            return pb.GenerateEvent(done=pb.GenerateDone(**{**vars(event), **totals}))
        tokens = pb.Tokens(
            tokens=[output_to_pb(output) for output in event.outputs],
            step=step_to_pb(event.progress) if event.progress else None,
            ready_at=event.ready_at,
        )
        return pb.GenerateEvent(tokens=tokens)
