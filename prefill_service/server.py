"""The Prefill service: protobuf in, protobuf out, errors to statuses. The work is elsewhere."""

import time
from contextlib import aclosing
from functools import partial

import grpc

from baton.v1 import common_pb2, prefill_pb2_grpc
from baton.v1 import prefill_pb2 as pb
from baton.worker.faults import status_of_faults
from baton.worker.prompt_cache import pins_from_pb
from baton.worker.replies import ReplyStreams
from baton.worker.translate import (
    continuation_of,
    due_at,
    output_to_pb,
    prompt_from_pb,
    sampling_from_pb,
    step_to_pb,
    totals_to_pb,
)
from prefill_service.pairs import Pairs
from prefill_service.worker import Done, Event, PrefillJob, PrefillWorker, Started


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    def __init__(
        self,
        worker: PrefillWorker,
        pairs: Pairs,
        vocab_size: int,
        replies: ReplyStreams,
    ) -> None:
        self._worker = worker
        self._pairs = pairs
        self._vocab_size = vocab_size
        self._replies = replies

    async def Prefill(self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext) -> None:
        async with (
            status_of_faults(context, request.request_id),
            aclosing(self._worker.prefill(self._job(request))) as events,
        ):
            answer = await self._replies.answers(request, context)
            async for event in events:
                await answer(_to_pb(event))

    def _job(self, request: pb.PrefillRequest) -> PrefillJob:
        has_destination = request.HasField("destination")
        sampling = sampling_from_pb(request.sampling, self._vocab_size)
        output, choice = continuation_of(request, sampling, self._vocab_size)
        return PrefillJob(
            prompt=prompt_from_pb(request.prompt_token_ids, self._vocab_size),
            sampling=sampling,
            output=output,
            choice=choice,
            cache_salt=request.cache_salt,
            kv_policy=request.kv_policy,
            due_at=due_at(request, time.monotonic()),
            pins=pins_from_pb(request.pins),
            open_sender=partial(self._pairs.sender, request.destination)
            if has_destination
            else None,
        )


def _to_pb(event: Event) -> pb.PrefillEvent:
    if isinstance(event, Started):
        started = pb.PrefillStarted(
            **vars(event),
            queue_s=event.started_at - event.received_at,
            sent_at=time.monotonic(),
        )
        return pb.PrefillEvent(started=started)
    if isinstance(event, Done):
        spans = [common_pb2.Span(start=start, end=end) for start, end in event.transfers]
        changed = {"transfers": spans, "totals": totals_to_pb(event.totals)}
        done = pb.PrefillDone(**{**vars(event), **changed})
        return pb.PrefillEvent(done=done)
    # The first tokens of a beam search are candidates for decode, no answer yet.
    drawn = [output for output in event.outputs if output.seq.sampling.beam is None]
    tokens = [output_to_pb(output) for output in drawn]
    steps = [step_to_pb(progress) for progress in event.chunks]
    return pb.PrefillEvent(first_tokens=pb.FirstTokens(tokens=tokens, steps=steps))
