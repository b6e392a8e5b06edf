"""The Worker service: protobuf in, protobuf out. What every worker answers, whatever its role."""

import math
import time

import grpc

from baton.cluster.workers import Role
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from baton.worker.prompt_cache import PromptCache
from baton.worker.replies import ReplyStreams
from baton.worker.role_change import RoleChange, RoleRefused
from baton.worker.status import WorkerStatus
from baton.worker.translate import layout_to_pb

_ROLES = {pb.ROLE_PREFILL: Role.PREFILL, pb.ROLE_DECODE: Role.DECODE}


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    def __init__(self, status: WorkerStatus, change: RoleChange, replies: ReplyStreams) -> None:
        self._status = status
        self._change = change
        self._replies = replies
        self._cache = PromptCache(status.parts.engine)

    async def GetInfo(
        self, request: pb.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.WorkerInfo:
        record = self._status.record()
        load = record.load
        return pb.WorkerInfo(
            worker_id=record.worker_id,
            incarnation=record.incarnation,
            role=pb.ROLE_PREFILL if record.role is Role.PREFILL else pb.ROLE_DECODE,
            model=record.model,
            layout=layout_to_pb(self._status.parts.cache.layout),
            max_model_len=record.max_model_len,
            max_num_seqs=record.max_num_seqs,
            num_blocks=record.num_blocks,
            load=pb.WorkerLoad(
                waiting=load.waiting,
                running=load.running,
                free_blocks=load.free_blocks,
                cached_blocks=load.cached_blocks,
                handoffs_in_flight=load.handoffs_in_flight,
                draining=load.draining,
                promised_blocks=load.promised_blocks,
            ),
            counters=self._status.counters(),
            links=[pb.TransferLink(**vars(link)) for link in record.links],
            transfer=pb.TransferResources(**vars(self._status.activity.transfers.resources())),
        )

    async def GetCache(
        self, request: pb.GetCacheRequest, context: grpc.aio.ServicerContext
    ) -> pb.CacheInfo:
        return self._cache.info(time.monotonic())

    async def Unpin(
        self, request: pb.UnpinRequest, context: grpc.aio.ServicerContext
    ) -> pb.UnpinResponse:
        return pb.UnpinResponse(unpinned=self._cache.unpin(request.id))

    async def FlushCache(
        self, request: pb.FlushCacheRequest, context: grpc.aio.ServicerContext
    ) -> pb.FlushCacheResponse:
        return pb.FlushCacheResponse(blocks=self._cache.flush())

    async def Drain(
        self, request: pb.DrainRequest, context: grpc.aio.ServicerContext
    ) -> pb.DrainResponse:
        status, activity = self._status, self._status.activity
        if request.undo:
            activity.take_again()
            status.announce()
            return pb.DrainResponse(drained=False)
        activity.stop_taking()
        status.announce()
        return pb.DrainResponse(drained=await activity.idle(request.timeout_s))

    async def ChangeRole(
        self, request: pb.ChangeRoleRequest, context: grpc.aio.ServicerContext
    ) -> pb.ChangeRoleResponse:
        role = _ROLES.get(request.role)
        if role is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "role must be prefill or decode")
        if not 0 <= request.timeout_s < math.inf:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "timeout_s must be a number of seconds, 0 or more"
            )
        try:
            drained = await self._change.begin(role, request.timeout_s)
        except RoleRefused as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return pb.ChangeRoleResponse(drained=drained)

    async def Replies(self, request: pb.RepliesRequest, context: grpc.aio.ServicerContext) -> None:
        await self._replies.serve(request.stream, context)
