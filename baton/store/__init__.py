"""The model store: any supported model, on disk, in one layout, ready to load.

Turns a name, a GGUF file, a Hugging Face directory or a hub id into a directory with config.json,
tokenizer.json, tokenizer_config.json, generation_config.json and safetensors weights. Imports
without torch, numpy or gguf; only the conversion of a GGUF file needs the latter two.
"""

import os
from pathlib import Path

from baton.store.errors import StoreError
from baton.store.progress import make_reporter
from baton.store.source import DEFAULT_MODEL
from baton.store.store import ModelStore, StoredModel

__all__ = [
    "DEFAULT_MODEL",
    "ModelStore",
    "StoreError",
    "StoredModel",
    "home",
    "open_store",
    "resolve",
]


def home() -> Path:
    """What Baton keeps for this user: BATON_HOME, by default ~/.cache/baton."""
    return Path(os.environ.get("BATON_HOME") or "~/.cache/baton").expanduser()


def open_store(progress: bool = True) -> ModelStore:
    """The store of this user."""
    return ModelStore(home(), make_reporter(progress))


def resolve(model: str, progress: bool = True) -> StoredModel:
    """The stored model that `model` means; added first if it is not there yet."""
    return open_store(progress).resolve(model)
