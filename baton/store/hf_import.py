"""A Hugging Face directory → the store: weights linked or copied, small files made uniform.

Uniform means: tokenizer_config.json has the chat template and the bos/eos texts as strings, and
generation_config.json has the list of ids that end an answer. config.json stays as it is.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.store.disk import Advance, link_or_copy, sha256_file
from baton.store.errors import StoreError
from baton.store.families import require_family
from baton.store.gguf_import import write_json
from baton.store.safetensors_file import read_header

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("BF16", "F16", "F32")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class HFDirectoryImporter:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._config = _read_json(path / "config.json")
        require_family(self._config.get("model_type"), path)
        _refuse_quantized(path, self._config)
        self._weights = _weight_files(path)
        self._tokenizer_config = _tokenizer_config(path)
        self._generation_config = self._with_end_ids(_tokenizer_ids(path))

    @property
    def work_bytes(self) -> int:
        return sum(file.stat().st_size for file in self._weights)

    def needed_bytes(self, target: Path) -> int:
        device = target.stat().st_dev
        files = (file.stat() for file in self._weights)
        return sum(stat.st_size for stat in files if stat.st_dev != device)

    def write(self, target: Path, advance: Advance) -> Mapping[str, str]:
        write_json(target / "tokenizer_config.json", self._tokenizer_config)
        write_json(target / "generation_config.json", self._generation_config)
        for name in ("config.json", "tokenizer.json", _INDEX):
            if name != _INDEX or len(self._weights) > 1:
                shutil.copyfile(self._path / name, target / name)
        known = {}
        for file in self._weights:
            link_or_copy(file, target / file.name)
            known[file.name] = sha256_file(target / file.name, advance)
        return known

    def _with_end_ids(self, ids: Mapping[str, int]) -> dict[str, Any]:
        path = self._path / "generation_config.json"
        generation = _read_json(path) if path.exists() else {}
        eos = generation.get("eos_token_id", self._config.get("eos_token_id"))
        if eos is None:
            eos = ids.get(self._tokenizer_config.get("eos_token", ""))
        if eos is not None:
            generation["eos_token_id"] = eos if isinstance(eos, list) else [eos]
        return generation


def _weight_files(path: Path) -> list[Path]:
    """The files that make up the weights, all present, complete and readable."""
    if (path / _WEIGHTS).exists():
        return [_check(path / _WEIGHTS, None)]
    if (path / _INDEX).exists():
        return _shards(path)
    if any(path.glob("pytorch_model*.bin")):
        raise StoreError(
            f"{path} holds its weights as pytorch_model.bin, a format that can run code when "
            "loaded; convert them with transformers' `save_pretrained` or get safetensors."
        )
    raise StoreError(f"{path} has no {_WEIGHTS}; get the weights in safetensors format.")


def _shards(path: Path) -> list[Path]:
    weight_map = _read_json(path / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise StoreError(f"{path / _INDEX} lists no weights; download it again.")
    shards: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        if Path(str(shard)).name != shard:
            raise StoreError(f"{path / _INDEX} names a file outside its directory; do not use it.")
        shards.setdefault(shard, set()).add(tensor)
    return [_check(path / name, tensors) for name, tensors in sorted(shards.items())]


def _check(file: Path, tensors: set[str] | None) -> Path:
    if not file.is_file():
        raise StoreError(f"{file} is missing; download the model again.")
    header = read_header(file)
    missing = (tensors or set()) - header.keys()
    if missing:
        raise StoreError(f"{file} lacks the tensor {min(missing)!r}; download it again.")
    dtypes = {str(entry.get("dtype")) for entry in header.values()} - set(_DTYPES)
    if dtypes:
        raise StoreError(
            f"{file} has weights of type {min(dtypes)}, which is not supported; get the model "
            "in bfloat16, float16 or float32."
        )
    return file


def _refuse_quantized(path: Path, config: Mapping[str, Any]) -> None:
    if config.get("quantization_config"):
        raise StoreError(
            f"{path} holds quantized weights, which are not supported in this layout; get the "
            "unquantized model, or a GGUF file."
        )


def _tokenizer_config(path: Path) -> dict[str, Any]:
    file = path / "tokenizer_config.json"
    config = _read_json(file) if file.exists() else {}
    special = path / "special_tokens_map.json"
    extra = _read_json(special) if special.exists() else {}
    for key in _SPECIAL_TOKENS:
        token = config.get(key) or extra.get(key)
        text = token.get("content") if isinstance(token, dict) else token
        if text is not None:
            config[key] = text
    template = _chat_template(path, config.pop("chat_template", None))
    return config if template is None else {**config, "chat_template": template}


def _chat_template(path: Path, template: object) -> str | None:
    """Newer models keep it in a file, some older ones a list of named ones."""
    file = path / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default", next(iter(named.values()), None))
    return template if isinstance(template, str) else None


def _tokenizer_ids(path: Path) -> dict[str, int]:
    """Texts and ids of the added tokens, as proof that the tokenizer can be read."""
    from tokenizers import Tokenizer

    file = path / "tokenizer.json"
    if not file.exists():
        raise StoreError(
            f"{path} has no tokenizer.json; make it with transformers' "
            "`AutoTokenizer.from_pretrained(PATH).save_pretrained(PATH)`."
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise StoreError(f"{file} cannot be read ({error}); download it again.") from error
    return {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} is missing or damaged ({error}); download it again.") from error
    if not isinstance(data, dict):
        raise StoreError(f"{path} holds no JSON object; download it again.")
    return data
