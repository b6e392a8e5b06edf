"""Reads a model folder in Hugging Face layout (config.json, safetensors) into a DecoderModel.

One tensor is in memory besides the model at a time: shards are mapped, each weight is read,
cast, fused and packed in turn. A tensor that is missing, has another shape, or that the model
would not use is an error that names it.
"""

import json
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.engine.model_config import ModelConfig
from baton.engine.models.checkpoint_names import source_for, unused_by
from baton.engine.models.decoder import DecoderModel

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class LoadError(ValueError):
    """A sentence that says what is wrong with the model folder."""


class Checkpoint:
    """The tensors of a folder by name. A TensorSource; a context manager that closes shards."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self._path = path
        self._dtype = dtype
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self.unused: set[str] = set()

    def __enter__(self) -> "Checkpoint":
        try:
            for shard in _shards(self._path):
                file = self._stack.enter_context(safe_open(shard, framework="pt"))
                self._files.update(dict.fromkeys(file.keys(), file))
        except (SafetensorError, OSError) as error:
            self._stack.close()
            raise LoadError(f"the weights in {self._path} cannot be read: {error}") from error
        self.unused = set(self._files)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.clear()
        self._stack.close()

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._files:
            raise LoadError(f"tensor {name!r} is missing from {self._path}")
        tensor: Tensor = self._files[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise LoadError(
                f"tensor {name!r} has shape {tuple(tensor.shape)}, config.json needs {shape}"
            )
        if tensor.dtype not in _FLOATS:
            raise LoadError(f"tensor {name!r} is {tensor.dtype}; only float weights can be loaded")
        self.unused.discard(name)
        # A copy: what stays in the model must not keep the file mapped.
        return tensor.to(self._dtype, copy=True)

    @property
    def names(self) -> Collection[str]:
        return self._files.keys()


def load_model(path: str | Path, dtype: str = "bfloat16") -> tuple[DecoderModel, ModelConfig]:
    """LoadError (a ValueError) says what is wrong with the folder."""
    if dtype not in DTYPES:
        raise LoadError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    folder = Path(path)
    config = ModelConfig.from_dir(folder)
    with Checkpoint(folder, DTYPES[dtype]) as checkpoint, torch.inference_mode():
        model = DecoderModel(config, source_for(config, checkpoint.names, checkpoint))
        _refuse_unused(checkpoint.unused, config)
    return model, config


def _refuse_unused(names: set[str], config: ModelConfig) -> None:
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    left = sorted(name for name in names - tied if not unused_by(config, name))
    if left:
        shown = ", ".join(left[:3]) + (", …" if len(left) > 3 else "")
        raise LoadError(
            f"the weights hold {len(left)} tensors that a {config.family} model does not use "
            f"({shown}): they do not match config.json"
        )


def _shards(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (ValueError, KeyError, AttributeError) as error:
            raise LoadError(f"{index} is not a safetensors index: {error!r}") from error
        shards = [path / name for name in names]
    else:
        shards = [path / "model.safetensors"]
    for shard in shards:
        if not shard.is_file():
            raise LoadError(f"{shard} is missing: the folder holds no complete safetensors weights")
    return shards
