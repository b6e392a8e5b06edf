"""A worker's first account of its own speed: a few real steps before it announces itself.

Kept under BATON_HOME for the same model, settings and hardware, so that only the first start
pays. Invariant: it uses a scheduler and block manager of its own, so nothing of it stays in
the worker's books or its prefix cache.
"""

import hashlib
import logging
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import orjson
import torch

from baton.cluster.settings import WorkerSettings
from baton.engine.block_manager import BlockManager
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.model_runner import ModelRunner
from baton.engine.prefill_scheduler import PrefillScheduler
from baton.engine.sampler import Sampler
from baton.engine.sampling_params import SamplingParams
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Sequence
from baton.step_totals import StepTotals
from baton.store import home

_log = logging.getLogger(__name__)
BUDGET_S = 2.0
LONG = 512
"""Tokens of a long prompt: what a default chunk has says little of one."""
Profile = tuple[StepTotals, ...]


def profile(
    settings: WorkerSettings, config: EngineConfig, scheduler: type[Scheduler], runner: ModelRunner
) -> Profile:
    """Measured steps, or those of an earlier start on the same machine."""
    path = home() / "profiles" / f"{_key(settings, config, scheduler)}.json"
    try:
        return tuple(StepTotals(**entry) for entry in orjson.loads(path.read_bytes()))
    except FileNotFoundError:
        measured = measure(config, scheduler, runner)
    except (OSError, ValueError, TypeError) as error:
        _log.warning("measuring again, %s cannot be used: %s", path, error)
        measured = measure(config, scheduler, runner)
    _keep(path, measured)
    return measured


def measure(
    config: EngineConfig,
    scheduler: type[Scheduler],
    runner: ModelRunner,
    budget_s: float = BUDGET_S,
) -> Profile:
    """Totals of short runs of growing size, until the budget would be passed."""
    deadline = time.monotonic() + budget_s
    measured: list[StepTotals] = []
    for number, run in enumerate(_runs(config, scheduler)):
        blocks = BlockManager(config.num_blocks, config.block_size, enable_prefix_cache=False)
        engine = Engine(scheduler(config, blocks), blocks, runner, Sampler(()))
        started, computed = time.monotonic(), time.thread_time()
        totals = _measure(engine, run)
        now, had = time.monotonic(), time.thread_time() - computed
        if number:  # the first one only warms up
            measured += [alone(each, had / (now - started)) for each in totals]
        if number and now + 2 * (now - started) > deadline:
            break
    return tuple(measured)


def alone(totals: StepTotals, share: float) -> StepTotals:
    """Steps as they are on a core that nobody else uses; this thread had `share` of it. Workers
    that share a core start together, and each would look as slow as all of them. Of several
    threads none says for how long all of them computed."""
    if torch.get_num_threads() > 1:
        return totals
    return replace(totals, seconds=totals.seconds * min(share, 1.0))


class _Run(NamedTuple):
    """Equal sequences side by side; once they decode, one more prompt of `late` tokens."""

    batch: int
    prompt: int
    output: int = 1
    late: int = 0


def _runs(config: EngineConfig, scheduler: type[Scheduler]) -> Iterator[_Run]:
    """What this worker can hold of a warm-up and a few typical loads."""
    long, most = max(config.chunk_size, LONG), config.max_num_seqs
    if scheduler is PrefillScheduler:
        runs = [_Run(1, size) for size in (16, 16, long // 8, long // 2, long, 2 * long)]
    else:
        runs = [
            *(_Run(1, 16, 3), _Run(1, 16, 6), _Run(min(16, most), 16, 4), _Run(1, long, 4)),
            *(_Run(min(8, most), 16, 4, long // 2), _Run(min(64, most), 16, 3)),
        ]
    for run in runs:
        per_sequence = -(-(run.prompt + run.output) // config.block_size)
        late = -(-(run.late + 1) // config.block_size) if run.late else 0
        longest = max(run.prompt, run.late) + run.output
        if run.prompt and longest <= config.capacity and per_sequence + late <= config.num_blocks:
            yield run._replace(batch=min(run.batch, (config.num_blocks - late) // per_sequence))


def _measure(engine: Engine[Scheduler], run: _Run) -> list[StepTotals]:
    def add(prompt: int, output: int) -> Sequence:
        sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        seq = Sequence([1] * prompt, sampling)
        engine.add(seq)
        return seq

    first, *_ = [add(run.prompt, run.output) for _ in range(run.batch)]
    while first.num_computed_tokens < run.prompt and engine.step() is not None:
        continue
    if run.late:
        add(run.late, 1)
    while engine.step() is not None:
        continue
    for seq in list(engine.scheduler.held):
        engine.end(seq.group)
    return [totals for totals in (first.prefill_steps, first.decode_steps) if totals.steps]


def _key(settings: WorkerSettings, config: EngineConfig, scheduler: type[Scheduler]) -> str:
    facts = (
        *(config.fingerprint, scheduler.__name__, settings.dtype, torch.get_num_threads()),
        *(config.chunk_size, config.block_size, config.max_num_seqs, config.capacity),
        *(len(os.sched_getaffinity(0)), platform.node(), _cpu(), torch.__version__),
        *(settings.kv_dtype, settings.kv_policy, os.environ.get("BATON_KERNELS", "auto"), "alone"),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("model name")), "")


def _keep(path: Path, measured: Profile) -> None:
    """Whole or not at all; a worker that cannot keep it measures again at its next start."""
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(orjson.dumps([asdict(totals) for totals in measured]))
        part.replace(path)
    except OSError as error:
        _log.warning("cannot keep this worker's speed in %s: %s", path, error)
