"""Hugging Face directories: linked weights, uniform small files, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from baton.store import ModelStore, StoreError
from baton.store import disk as disk_module
from tests.support.models_on_disk import TEMPLATE, edit_json, write_hf, write_json


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "home")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "My Model")


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_weights_are_linked_and_the_config_stays(store: ModelStore, model: Path) -> None:
    stored = store.resolve(str(model))
    assert stored.name == "My-Model"
    assert (stored.path / "model.safetensors").samefile(model / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        assert (stored.path / name).read_bytes() == (model / name).read_bytes()
        assert not (stored.path / name).samefile(model / name)


def test_weights_are_copied_where_links_do_not_work(
    store: ModelStore, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("cross-device link")

    monkeypatch.setattr(disk_module.os, "link", refuse)
    copied = store.resolve(str(model)).path / "model.safetensors"
    assert not copied.samefile(model / "model.safetensors")
    assert copied.read_bytes() == (model / "model.safetensors").read_bytes()


def test_links_into_a_download_cache_become_files(
    store: ModelStore, model: Path, tmp_path: Path
) -> None:
    weights = model / "model.safetensors"
    weights.rename(tmp_path / "blob")
    weights.symlink_to(tmp_path / "blob")
    stored = store.resolve(str(model)).path / "model.safetensors"
    assert not stored.is_symlink() and stored.samefile(tmp_path / "blob")


def test_sharded_weights_keep_their_index(store: ModelStore, tmp_path: Path) -> None:
    model = write_hf(tmp_path / "sharded", shards=3)
    stored = store.resolve(str(model))
    weight_map = read(stored.path / "model.safetensors.index.json")["weight_map"]
    assert len(set(weight_map.values())) == 3
    for name, shard in weight_map.items():
        assert name in load_file(stored.path / shard)


def test_the_fingerprint_of_equal_directories_is_equal(tmp_path: Path) -> None:
    paths = [write_hf(tmp_path / name) for name in "ab"]
    edit_json(paths[1] / "config.json", _name_or_path="elsewhere", transformers_version="9.9")
    prints = [ModelStore(tmp_path / f"home-{p.name}").resolve(str(p)).fingerprint for p in paths]
    assert prints[0] == prints[1]


def test_the_ids_that_end_an_answer_are_always_a_list(store: ModelStore, model: Path) -> None:
    stored = store.resolve(str(model))
    assert read(stored.path / "generation_config.json") == {"eos_token_id": [2]}


def test_a_generation_config_wins_over_the_config(store: ModelStore, model: Path) -> None:
    write_json(model / "generation_config.json", {"eos_token_id": [0, 2], "temperature": 0.6})
    generation = read(store.resolve(str(model)).path / "generation_config.json")
    assert generation == {"eos_token_id": [0, 2], "temperature": 0.6}


def test_the_end_is_found_by_its_text_if_no_id_is_given(store: ModelStore, tmp_path: Path) -> None:
    model = write_hf(tmp_path / "m", eos_token_id=None)
    edit_json(model / "tokenizer_config.json", eos_token={"content": "<|im_end|>"})
    stored = store.resolve(str(model))
    assert read(stored.path / "generation_config.json")["eos_token_id"] == [2]
    assert read(stored.path / "tokenizer_config.json")["eos_token"] == "<|im_end|>"


def test_special_texts_come_from_the_special_tokens_map_too(store: ModelStore, model: Path) -> None:
    write_json(model / "special_tokens_map.json", {"bos_token": {"content": "<|im_start|>"}})
    config = read(store.resolve(str(model)).path / "tokenizer_config.json")
    assert config["bos_token"] == "<|im_start|>"


@pytest.mark.parametrize(
    "template",
    [TEMPLATE, [{"name": "tool", "template": "x"}, {"name": "default", "template": TEMPLATE}]],
)
def test_the_chat_template_is_one_text(store: ModelStore, model: Path, template: Any) -> None:
    edit_json(model / "tokenizer_config.json", chat_template=template)
    config = read(store.resolve(str(model)).path / "tokenizer_config.json")
    assert config["chat_template"] == TEMPLATE


def test_a_template_file_wins(store: ModelStore, model: Path) -> None:
    (model / "chat_template.jinja").write_text("from file")
    config = read(store.resolve(str(model)).path / "tokenizer_config.json")
    assert config["chat_template"] == "from file"


def test_pytorch_pickles_are_refused(store: ModelStore, model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(StoreError, match=r"pytorch_model\.bin.*run code.*save_pretrained"):
        store.resolve(str(model))


def test_missing_parts_are_named(store: ModelStore, model: Path) -> None:
    for name, sentence in (
        ("model.safetensors", r"has no model\.safetensors"),
        ("tokenizer.json", r"has no tokenizer\.json; make it with"),
        ("config.json", r"has no config\.json; give a directory"),
    ):
        content = (model / name).read_bytes()
        (model / name).unlink()
        with pytest.raises(StoreError, match=sentence):
            store.resolve(str(model))
        (model / name).write_bytes(content)
    assert store.resolve(str(model)).path.is_dir()


def test_a_missing_shard_is_named(store: ModelStore, tmp_path: Path) -> None:
    model = write_hf(tmp_path / "m", shards=2)
    (model / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(StoreError, match=r"model-00002-of-00002.safetensors is missing"):
        store.resolve(str(model))


def test_a_shard_outside_the_directory_is_refused(store: ModelStore, tmp_path: Path) -> None:
    model = write_hf(tmp_path / "m", shards=2)
    write_hf(tmp_path / "other")
    index = {"weight_map": {"model.norm.weight": "../other/model.safetensors"}}
    write_json(model / "model.safetensors.index.json", index)
    with pytest.raises(StoreError, match=r"names a file outside"):
        store.resolve(str(model))


def test_a_tensor_that_the_index_promises_is_missed(store: ModelStore, tmp_path: Path) -> None:
    model = write_hf(tmp_path / "m", shards=2)
    shard = model / "model-00001-of-00002.safetensors"
    tensors = load_file(shard)
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, shard)
    with pytest.raises(StoreError, match=r"lacks the tensor 'model\.embed_tokens\.weight'"):
        store.resolve(str(model))


@pytest.mark.parametrize("size", [0, 5, 8, 100, 5000, -1])
def test_truncated_weights_are_found(store: ModelStore, model: Path, size: int) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    with pytest.raises(StoreError, match="truncated or damaged"):
        store.resolve(str(model))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_damaged_json_is_found(store: ModelStore, model: Path, name: str, text: str) -> None:
    (model / name).write_text(text)
    with pytest.raises(StoreError, match="download it again"):
        store.resolve(str(model))


def test_an_unsupported_family_lists_the_supported(store: ModelStore, tmp_path: Path) -> None:
    model = write_hf(tmp_path / "m", model_type="bloom")
    with pytest.raises(StoreError, match=r"'bloom'.*llama, mistral, mixtral, qwen2, qwen3"):
        store.resolve(str(model))


def test_quantized_checkpoints_are_refused(store: ModelStore, tmp_path: Path) -> None:
    model = write_hf(tmp_path / "m", quantization_config={"quant_method": "awq"})
    with pytest.raises(StoreError, match="quantized weights"):
        store.resolve(str(model))


def test_weights_of_an_odd_type_are_refused(store: ModelStore, model: Path) -> None:
    save_file({"x": np.zeros(3, np.int8)}, model / "model.safetensors")
    with pytest.raises(StoreError, match="type I8, which is not supported"):
        store.resolve(str(model))
