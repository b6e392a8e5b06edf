"""A worker's account of itself: for the registry, and for whoever asks over gRPC."""

from collections.abc import Callable
from dataclasses import dataclass

from baton.cluster import workers
from baton.cluster.settings import WorkerSettings
from baton.cluster.workers import Role, WorkerLoad, WorkerRecord
from baton.engine.decode_scheduler import DecodeScheduler
from baton.v1 import worker_pb2 as pb
from baton.worker.activity import Activity
from baton.worker.boot import Parts


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
            model=self.parts.loaded.stored.name,
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
            cores=self.settings.cores or (),
            streams_replies=True,
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
