"""From settings to a model in memory and an engine around it.

Everything that can be wrong with the machine or the model is found here, before the worker
announces itself, and raised as SettingsError with what to do about it.
"""

import json
import os
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch

from baton.cluster.errors import SettingsError
from baton.cluster.settings import DecodeSettings, PrefillSettings, WorkerSettings
from baton.engine.block_manager import BlockManager
from baton.engine.config import EngineConfig
from baton.engine.decode_scheduler import DecodeScheduler
from baton.engine.engine import Engine, Runner
from baton.engine.kv.policies import check_policy, policies_of
from baton.engine.kv_cache import KVCache
from baton.engine.kv_layout import KVLayout, kv_dtype
from baton.engine.loader import load_model
from baton.engine.model_config import ModelConfig
from baton.engine.model_runner import ModelRunner
from baton.engine.models.decoder import DecoderModel
from baton.engine.pins import Pins
from baton.engine.sampler import Sampler
from baton.engine.scheduler import Scheduler
from baton.engine.speculation.build import add_drafts, draft_pool_bytes
from baton.engine.transfer import shm
from baton.engine.transfer.shm import SharedMemory
from baton.kv_policy import parse_policy
from baton.speculate import parse_speculation
from baton.store import StoredModel, StoreError, resolve
from baton.worker.heap import keep_freed_memory
from baton.worker.memory import available_bytes
from baton.worker.profile import Profile, profile

S = TypeVar("S", bound=Scheduler)


@dataclass(frozen=True)
class Loaded:
    """Weights in memory. They serve either role."""

    stored: StoredModel
    model: DecoderModel
    config: ModelConfig


@dataclass(frozen=True)
class Parts(Generic[S]):
    """A loaded worker: the engine and what its surroundings need to know of it."""

    engine: Engine[S]
    cache: KVCache
    config: EngineConfig
    vocab_size: int
    loaded: Loaded
    profile: Profile = ()
    memory: SharedMemory | None = None
    """Where the cache lies, if decode workers of this host may map it."""


def boot(
    settings: WorkerSettings, scheduler_type: type[S], loaded: Loaded | None = None
) -> Parts[S]:
    """Sets up the process, loads the model unless it is `loaded`, makes the KV pool."""
    _take_cores(settings)
    keep_freed_memory()
    try:
        stored = loaded.stored if loaded else resolve(settings.model, progress=False)
        model_config = ModelConfig.from_hf(json.loads((stored.path / "config.json").read_text()))
        dtype = kv_dtype(settings.kv_dtype, settings.dtype)
        layout = KVLayout.of(model_config, settings.block_size, dtype, stored.fingerprint)
        policy = parse_policy(settings.kv_policy)
        check_policy(policy, model_config, layout)
        num_blocks = _num_blocks(settings, layout)
        loaded = loaded or Loaded(stored, *load_model(stored.path, settings.dtype))
    except (StoreError, ValueError) as error:
        raise SettingsError(str(error)) from error
    config = _engine_config(settings, loaded.config, num_blocks, layout)
    memory = shared_memory(settings, layout.bytes_per_block * num_blocks)
    cache = KVCache(layout, num_blocks, memory=memory.bytes if memory else None)
    blocks = BlockManager(
        num_blocks,
        settings.block_size,
        settings.enable_prefix_cache,
        loaded.config.widest_window,
        layout.num_tail_blocks,
        pins_for(settings, num_blocks),
    )
    runner = ModelRunner(loaded.model, cache)
    scheduler, sampler = scheduler_type(config, blocks), Sampler(config.eos_token_ids)
    stepping: Runner = runner
    if isinstance(settings, DecodeSettings) and isinstance(scheduler, DecodeScheduler):
        stepping = _with_drafts(settings, scheduler, runner, sampler, stored)
    engine = Engine(scheduler, blocks, stepping, sampler)
    speed = profile(settings, config, scheduler_type, runner) if settings.self_profile else ()
    return Parts(engine, cache, config, loaded.config.vocab_size, loaded, speed, memory)


def pins_for(settings: WorkerSettings, num_blocks: int) -> Pins:
    """Quotas in blocks."""
    per_tenant = int(settings.pin_quota * num_blocks)
    return Pins(per_tenant, min(2 * per_tenant, num_blocks))


def _with_drafts(
    settings: DecodeSettings,
    scheduler: DecodeScheduler,
    runner: ModelRunner,
    sampler: Sampler,
    served: StoredModel,
) -> Runner:
    speculation = parse_speculation(settings.speculate)
    try:
        if speculation is not None and speculation.kind == "draft":
            model = resolve(speculation.model, progress=False)
            speculation = replace(speculation, model=str(model.path))
            pool = draft_pool_bytes(model.path, runner, scheduler.config)
            _check_memory(pool, "the KV pool of the draft model")
        return add_drafts(speculation, scheduler, runner, sampler, served.path)
    except (StoreError, ValueError) as error:
        raise SettingsError(str(error)) from error


def shared_memory(settings: WorkerSettings, num_bytes: int) -> SharedMemory | None:
    """For the cache of a prefill worker whose settings let KV go by shared memory."""
    wanted = isinstance(settings, PrefillSettings) and settings.transport in ("auto", "shm")
    return SharedMemory(num_bytes) if wanted and shm.supported() else None


def _take_cores(settings: WorkerSettings) -> None:
    if settings.cores is not None:
        try:
            os.sched_setaffinity(0, settings.cores)
        except OSError as error:
            allowed = sorted(os.sched_getaffinity(0))
            raise SettingsError(
                f"--cores {settings.cores} cannot be used: this process may run on {allowed}"
            ) from error
    torch.set_num_threads(settings.threads or len(os.sched_getaffinity(0)))


def _num_blocks(settings: WorkerSettings, layout: KVLayout) -> int:
    block_bytes = layout.bytes_per_block
    num_blocks = settings.num_blocks or settings.kv_memory // block_bytes
    if num_blocks < 1:
        raise SettingsError(
            f"--kv-memory of {settings.kv_memory} bytes holds no KV block of {block_bytes} bytes; "
            f"give at least {block_bytes}"
        )
    _check_memory(num_blocks * block_bytes, f"the KV pool of {num_blocks} blocks")
    return num_blocks


def _check_memory(need: int, what: str) -> None:
    free = available_bytes()
    if need > free:
        raise SettingsError(
            f"too little memory for {what}: {need / 2**20:.0f} MiB are needed, "
            f"{free / 2**20:.0f} MiB are free; lower --kv-memory or --num-blocks"
        )


def _engine_config(
    settings: WorkerSettings, model: ModelConfig, num_blocks: int, layout: KVLayout
) -> EngineConfig:
    longest = model.max_position_embeddings
    if settings.max_model_len is not None and settings.max_model_len > longest:
        raise SettingsError(
            f"--max-model-len {settings.max_model_len} is beyond the model's context of {longest}"
        )
    try:
        return EngineConfig(
            num_blocks=num_blocks,
            block_size=settings.block_size,
            max_num_seqs=settings.max_num_seqs,
            max_model_len=settings.max_model_len or longest,
            chunk_size=settings.tokens_per_step,
            max_queue=settings.max_queue,
            enable_prefix_cache=settings.enable_prefix_cache,
            eos_token_ids=model.eos_token_ids,
            fingerprint=layout.fingerprint,
            kv_dtype=layout.dtype,
            num_tail_blocks=layout.num_tail_blocks,
            kv_policy=parse_policy(settings.kv_policy),
            kv_policies=policies_of(model, layout),
            states_per_block=layout.states_per_block,
        )
    except ValueError as error:
        raise SettingsError(str(error)) from error
