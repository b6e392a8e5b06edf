"""A worker's account of itself: for the registry, and for whoever asks over gRPC."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from baton.cluster import workers
from baton.cluster.settings import WorkerSettings
from baton.cluster.workers import Role, WorkerLoad, WorkerRecord
from baton.engine.decode_scheduler import DecodeScheduler
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from baton.worker.activity import Activity
from baton.worker.boot import Parts
from baton.worker.prompt_cache import PromptCache
from baton.worker.translate import layout_to_pb


@dataclass
class WorkerStatus:
    """`address` is where others reach the worker; set before the first snapshot is taken.
    `announce` tells the registry of a change at once."""

    role: Role
    settings: WorkerSettings
    incarnation: str
    parts: Parts
    activity: Activity
    address: str = ""
    announce: Callable[[], None] = lambda: None

    def load(self) -> WorkerLoad:
        scheduler, blocks = self.parts.engine.scheduler, self.parts.engine.blocks
        return WorkerLoad(
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            free_blocks=blocks.num_free,
            cached_blocks=blocks.num_cached,
            handoffs_in_flight=self.activity.transfers.in_flight,
            draining=self.activity.draining,
            promised_blocks=blocks.num_promised,
        )

    def record(self) -> WorkerRecord:
        layout = self.parts.cache.layout
        names = ("fingerprint", "num_layers", "num_kv_heads", "head_dim", "block_size", "dtype")
        return WorkerRecord(
            worker_id=self.settings.worker_id,
            incarnation=self.incarnation,
            role=self.role,
            address=self.address,
            model=self.parts.model.name,
            layout=workers.KVLayout(**{name: getattr(layout, name) for name in names}),
            max_model_len=self.parts.config.capacity,
            max_num_seqs=self.parts.config.max_num_seqs,
            num_blocks=self.parts.config.num_blocks,
            load=self.load(),
            links=self.activity.transfers.links(),
            chunk_size=self.parts.config.chunk_size,
            kv_policy=str(self.parts.config.kv_policy),
            kv_policies=self.parts.config.kv_policies,
            profile=self.parts.profile,
        )

    def counters(self) -> pb.WorkerCounters:
        engine, transfers = self.parts.engine, self.activity.transfers
        scheduler = engine.scheduler
        counters = pb.WorkerCounters(
            handoffs=transfers.handoffs,
            handoffs_failed=transfers.handoffs_failed,
            blocks_transferred=transfers.blocks,
            bytes_transferred=transfers.bytes,
            prefill_tokens_computed=scheduler.prefill_tokens_computed,
            prefill_tokens_cached=scheduler.prefill_tokens_cached,
            tokens_generated=engine.tokens_generated,
            blocks_reused=engine.blocks.num_reused,
            blocks_evicted=engine.blocks.num_evicted,
            pins_broken=engine.blocks.num_pins_broken,
        )
        if isinstance(scheduler, DecodeScheduler):
            counters.preemptions = scheduler.num_preemptions
            counters.tokens_recomputed = scheduler.tokens_recomputed
            if scheduler.drafting is not None:
                counters.tokens_drafted = scheduler.drafting.tokens_drafted
                counters.tokens_accepted = scheduler.drafting.tokens_accepted
        return counters


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    def __init__(self, status: WorkerStatus) -> None:
        self._status = status
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
