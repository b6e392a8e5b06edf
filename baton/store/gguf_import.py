"""A GGUF file → a directory in Hugging Face layout, weights in bf16.

Everything that can be refused is refused before the first byte is written. Needs numpy and the
`gguf` package, which machines that only route requests do not have.
"""

import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from baton.store.disk import Advance
from baton.store.errors import StoreError
from baton.store.gguf_config import model_config
from baton.store.gguf_file import read_gguf
from baton.store.gguf_tokenizer import make_tokenizer, read_vocabulary, tokenizer_config
from baton.store.gguf_weights import ROPE_FREQS, plan_tensors, read_floats, stream_bf16
from baton.store.safetensors_file import TensorSpec, write_tensors

_WEIGHTS = "model.safetensors"


class GGUFImporter:
    def __init__(self, path: Path) -> None:
        _require_packages(path)
        self._file = read_gguf(path)
        _refuse_parts(path, self._file.metadata.get("split.count", 1))
        config = model_config(self._file, read_floats(self._file, ROPE_FREQS))
        self._plans = plan_tensors(self._file, config)
        self._vocabulary = read_vocabulary(self._file, config["vocab_size"])
        self._tokenizer = make_tokenizer(self._vocabulary)
        self._config = {**config, **self._token_ids()}

    @property
    def work_bytes(self) -> int:
        return sum(plan.spec.nbytes for plan in self._plans)

    def needed_bytes(self, target: Path) -> int:
        return self.work_bytes

    def write(self, target: Path, advance: Advance) -> Mapping[str, str]:
        context = self._config["max_position_embeddings"]
        write_json(target / "config.json", self._config)
        write_json(target / "generation_config.json", self._token_ids())
        write_json(target / "tokenizer_config.json", tokenizer_config(self._vocabulary, context))
        self._tokenizer.save(str(target / "tokenizer.json"), pretty=False)
        specs = [plan.spec for plan in self._plans]
        return {_WEIGHTS: write_tensors(target / _WEIGHTS, self._tensors(), specs, advance)}

    def _tensors(self) -> Iterator[tuple[TensorSpec, Iterable[bytes]]]:
        with self._file.path.open("rb") as stream:
            for plan in self._plans:
                yield plan.spec, stream_bf16(stream, self._file.path, plan)

    def _token_ids(self) -> dict[str, Any]:
        metadata = self._vocabulary.metadata
        ids = {
            "bos_token_id": metadata.token_id("bos"),
            "eos_token_id": self._vocabulary.end_ids() or None,
            "pad_token_id": metadata.token_id("padding"),
        }
        return {key: value for key, value in ids.items() if value is not None}


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _require_packages(path: Path) -> None:
    missing = [name for name in ("numpy", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise StoreError(
            f"Converting {path} needs {' and '.join(missing)}; install them with "
            "`pip install 'baton-serve[worker]'`, or add the model on a machine that has them."
        )


def _refuse_parts(path: Path, count: object) -> None:
    if count not in (0, 1):
        raise StoreError(
            f"{path} is one of {count} parts; join them first with "
            "`llama-gguf-split --merge FIRST_PART OUTPUT`."
        )
