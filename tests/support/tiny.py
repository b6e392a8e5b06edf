"""A tiny random Llama in Hugging Face layout, and workers around it in this process."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from baton.cluster.rpc import ChannelPool, make_server
from baton.cluster.settings import DecodeSettings, PrefillSettings, WorkerSettings
from baton.cluster.tls.folder import open_tls
from baton.cluster.workers import Role, new_incarnation
from baton.engine.async_engine import AsyncEngine
from baton.engine.block_manager import BlockManager
from baton.engine.config import EngineConfig
from baton.engine.decode_scheduler import DecodeScheduler
from baton.engine.engine import Engine
from baton.engine.kv.policies import policies_of
from baton.engine.kv_cache import KVCache
from baton.engine.kv_layout import KVLayout, kv_dtype
from baton.engine.loader import load_model
from baton.engine.model_runner import ModelRunner
from baton.engine.prefill_scheduler import PrefillScheduler
from baton.engine.sampler import Sampler
from baton.kv_policy import parse_policy
from baton.store import StoredModel
from baton.v1 import decode_pb2_grpc, prefill_pb2_grpc, worker_pb2_grpc
from baton.worker.activity import Activity
from baton.worker.boot import Loaded, Parts, pins_for, shared_memory
from baton.worker.replies import ReplyStreams
from baton.worker.role_change import RoleChange
from baton.worker.servicer import WorkerServicer
from baton.worker.status import WorkerStatus
from decode_service.inbox import Inbox
from decode_service.server import DecodeServicer
from decode_service.transfer import KVTransferServicer
from decode_service.worker import DecodeWorker
from prefill_service.pairs import Pairs
from prefill_service.server import PrefillServicer
from prefill_service.worker import PrefillWorker

VOCAB = 199


def write_tiny_llama(path: Path, seed: int = 0) -> Path:
    """2 layers, 4 heads on 2 KV heads; fp32 weights large enough to give varied text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=2,
        initializer_range=0.5,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return path


@lru_cache
def _model(path: Path) -> Any:
    return load_model(path, "float32")


def make_parts(path: Path, settings: WorkerSettings, scheduler_type: type) -> Parts[Any]:
    """As `boot`, without the store and without touching the process."""
    model, model_config = _model(path)
    num_blocks = settings.num_blocks or 64
    dtype = kv_dtype(settings.kv_dtype, "float32")
    layout = KVLayout.of(model_config, settings.block_size, dtype, "tiny")
    memory = shared_memory(settings, layout.bytes_per_block * num_blocks)
    cache = KVCache(layout, num_blocks, memory=memory.bytes if memory else None)
    config = EngineConfig(
        num_blocks=num_blocks,
        block_size=settings.block_size,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len or model_config.max_position_embeddings,
        chunk_size=settings.tokens_per_step,
        max_queue=settings.max_queue,
        eos_token_ids=model_config.eos_token_ids,
        fingerprint="tiny",
        kv_dtype=dtype,
        num_tail_blocks=layout.num_tail_blocks,
        kv_policy=parse_policy(settings.kv_policy),
        kv_policies=policies_of(model_config, layout),
        states_per_block=layout.states_per_block,
    )
    blocks = BlockManager(
        num_blocks,
        settings.block_size,
        window=model_config.widest_window,
        num_tail_blocks=layout.num_tail_blocks,
        pins=pins_for(settings, num_blocks),
    )
    engine = Engine(
        scheduler_type(config, blocks),
        blocks,
        ModelRunner(model, cache),
        Sampler(config.eos_token_ids),
    )
    loaded = Loaded(StoredModel("tiny", path, "tiny"), model, model_config)
    return Parts(engine, cache, config, VOCAB, loaded, memory=memory)


@dataclass
class RunningWorker:
    """A worker behind a real gRPC server on loopback, its insides in reach."""

    address: str
    parts: Parts[Any]
    status: WorkerStatus
    work: Any
    transfer: Any = None
    """Its end of the transports: `Pairs` at prefill, `Inbox` at decode."""

    def assert_idle(self) -> None:
        """Nothing is held, promised, queued or in flight."""
        scheduler, blocks = self.parts.engine.scheduler, self.parts.engine.blocks
        blocks.check_integrity([])
        assert blocks.num_free == blocks.num_blocks
        assert blocks.num_promised == 0 and scheduler.num_promised_seqs == 0
        assert not list(scheduler.sequences())
        assert self.status.activity.transfers.in_flight == 0

    async def wait_idle(self, timeout_s: float = 10.0) -> None:
        """Waits until the books show an idle worker; the last check says what is not."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while asyncio.get_running_loop().time() < deadline:
            with contextlib.suppress(AssertionError, RuntimeError):
                return self.assert_idle()
            await asyncio.sleep(0.01)
        self.assert_idle()


@contextlib.asynccontextmanager
async def run_prefill(path: Path, **settings: Any) -> AsyncIterator[RunningWorker]:
    values = {"dtype": "float32", "block_size": 4, "chunk_size": 64, **settings}
    config = PrefillSettings.build(**values)
    parts = make_parts(path, config, PrefillScheduler)
    tls = open_tls(config.tls_dir)
    engine, activity, channels = AsyncEngine(parts.engine), Activity(), ChannelPool(tls=tls)
    pairs = Pairs(config, parts.cache, channels, parts.memory)
    activity.transfers.links, activity.transfers.resources = pairs.links, pairs.resources
    worker = PrefillWorker(engine, parts.cache.layout, activity)
    status = WorkerStatus(Role.PREFILL, config, new_incarnation(), parts, activity)
    replies = ReplyStreams()
    servicer = PrefillServicer(worker, pairs, VOCAB, replies)
    adders = [partial(prefill_pb2_grpc.add_PrefillServicer_to_server, servicer)]
    async with _serving(engine, status, replies, adders) as address:
        yield RunningWorker(address, parts, status, worker, pairs)
        await pairs.close()
    await channels.close()


@contextlib.asynccontextmanager
async def run_decode(path: Path, **settings: Any) -> AsyncIterator[RunningWorker]:
    values = {"dtype": "float32", "block_size": 4, "chunk_size": 64, **settings}
    config = DecodeSettings.build(**values)
    parts = make_parts(path, config, DecodeScheduler)
    engine, activity = AsyncEngine(parts.engine), Activity()
    worker = DecodeWorker(engine, parts.cache, activity, config.lease_s)
    status = WorkerStatus(Role.DECODE, config, new_incarnation(), parts, activity)
    inbox = Inbox(config, parts.cache.layout)
    activity.transfers.resources = inbox.resources
    replies = ReplyStreams()
    decode = DecodeServicer(worker, status, VOCAB, inbox, replies)
    transfer = KVTransferServicer(
        worker, inbox, parts.cache.layout, status.incarnation, config.lease_s
    )
    adders = [partial(decode_pb2_grpc.add_DecodeServicer_to_server, decode), transfer.add_to]
    async with _serving(engine, status, replies, adders) as address:
        yield RunningWorker(address, parts, status, worker, inbox)
    inbox.close()


@contextlib.asynccontextmanager
async def _serving(
    engine: AsyncEngine[Any], status: WorkerStatus, replies: ReplyStreams, adders: list[Any]
) -> AsyncIterator[str]:
    servicer = WorkerServicer(status, RoleChange(status), replies)
    own = partial(worker_pb2_grpc.add_WorkerServicer_to_server, servicer)
    tls = open_tls(status.settings.tls_dir)
    server, port = await make_server([*adders, own], "127.0.0.1:0", [], tls=tls)
    status.address = f"127.0.0.1:{port}"
    engine.start()
    await server.start()
    try:
        yield status.address
    finally:
        replies.close()
        await server.stop(0.1)
        await engine.stop()
