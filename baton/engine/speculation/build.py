"""From what `--speculate` says to a decode scheduler that drafts and a runner that fills drafts."""

import json
from pathlib import Path

from baton.engine.block_manager import BlockManager
from baton.engine.config import EngineConfig
from baton.engine.decode_scheduler import DecodeScheduler
from baton.engine.engine import Runner
from baton.engine.kv_cache import KVCache
from baton.engine.kv_layout import KVLayout
from baton.engine.loader import load_model
from baton.engine.model_config import ModelConfig
from baton.engine.model_runner import ModelRunner
from baton.engine.sampler import Sampler
from baton.engine.speculation.draft_model import Ahead, DraftingRunner, DraftModel
from baton.engine.speculation.drafting import Drafting
from baton.engine.speculation.lookup import Lookup
from baton.speculate import Speculation


def add_drafts(
    speculation: Speculation | None,
    scheduler: DecodeScheduler,
    runner: ModelRunner,
    sampler: Sampler,
    target: Path,
) -> Runner:
    """Makes the scheduler draft; the runner to step with. `target` is the folder of the model
    that is served; `speculation.model` is a folder too. ValueError: the draft model cannot serve
    this one."""
    if speculation is None:
        return runner
    if speculation.kind == "ngram":
        match = speculation.match
        scheduler.drafting = Drafting(lambda: Lookup(match), speculation.tokens)
        return runner
    draft_model = _draft_model(Path(speculation.model), scheduler, runner, sampler, target)
    scheduler.drafting = Drafting(Ahead, speculation.tokens)
    return DraftingRunner(runner, draft_model)


def draft_pool_bytes(path: Path, target: ModelRunner, config: EngineConfig) -> int:
    """What the draft model's own cache will take."""
    return _layout(ModelConfig.from_dir(path), target, config).bytes_per_block * config.num_blocks


def _layout(model: ModelConfig, target: ModelRunner, config: EngineConfig) -> KVLayout:
    return KVLayout.of(model, config.block_size, target.kv_cache.layout.compute_dtype)


def _draft_model(
    path: Path, scheduler: DecodeScheduler, runner: ModelRunner, sampler: Sampler, target: Path
) -> DraftModel:
    """Its pool has as many blocks as the target's; its cache is never quantized."""
    config = scheduler.config
    model, model_config = load_model(path, runner.kv_cache.layout.compute_dtype)
    sizes = model_config.vocab_size, runner.model.config.vocab_size
    if sizes[0] != sizes[1] or _words(path) != _words(target):
        raise ValueError(
            f"--speculate: the draft model {path} has another vocabulary ({sizes[0]} tokens) than "
            f"the model that is served ({sizes[1]} tokens)"
        )
    cache = KVCache(_layout(model_config, runner, config), config.num_blocks)
    blocks = BlockManager(config.num_blocks, config.block_size, enable_prefix_cache=False)
    return DraftModel(
        ModelRunner(model, cache), blocks, sampler, model_config.max_position_embeddings
    )


def _words(path: Path) -> dict[str, int] | None:
    """The tokenizer's tokens and their ids; None when the folder has none to compare."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    vocab = content.get("model", {}).get("vocab")
    added = {token["content"]: token["id"] for token in content.get("added_tokens", [])}
    return {**vocab, **added} if isinstance(vocab, dict) else None
