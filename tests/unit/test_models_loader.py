"""Model folders that load, and the sentences for those that do not."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.loader import LoadError, load_model
from tests.support.families import hf_config, reference_model

Weights = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    reference = reference_model("llama")
    (tmp_path / "config.json").write_text(json.dumps(hf_config(reference)))
    weights = {name: weight.contiguous() for name, weight in reference.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    return tmp_path


def edit(folder: Path, change: Callable[[Weights], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit(folder, lambda w: w.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(LoadError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' is missing"):
        load_model(folder, "float32")


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    edit(folder, lambda w: w.update({"model.norm.weight": torch.ones(47)}))
    with pytest.raises(LoadError, match=r"'model\.norm\.weight' has shape \(47,\).*needs \(48,\)"):
        load_model(folder, "float32")


def test_tensors_that_the_model_would_ignore_are_an_error(folder: Path) -> None:
    """A bias that config.json denies would otherwise give wrong text without a word."""
    edit(folder, lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(48)}))
    with pytest.raises(LoadError, match=r"does not use .*q_proj\.bias"):
        load_model(folder, "float32")


def test_leftovers_of_older_checkpoints_are_accepted(folder: Path) -> None:
    old = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(folder, lambda w: w.update({old: torch.ones(4)}))
    load_model(folder, "float32")


def test_integer_weights_are_refused(folder: Path) -> None:
    edit(folder, lambda w: w.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}))
    with pytest.raises(LoadError, match="only float weights"):
        load_model(folder, "float32")


def test_a_truncated_file_is_said_to_be_unreadable(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(LoadError, match="cannot be read"):
        load_model(folder, "float32")


def test_a_folder_without_weights_or_with_a_missing_shard_is_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(LoadError, match=r"model\.safetensors is missing"):
        load_model(folder, "float32")
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(LoadError, match=r"model-00002-of-00002\.safetensors is missing"):
        load_model(folder, "float32")


def test_a_broken_index_is_named(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(LoadError, match="not a safetensors index"):
        load_model(folder, "float32")


def test_an_unknown_dtype_is_refused(folder: Path) -> None:
    with pytest.raises(LoadError, match="dtype must be one of"):
        load_model(folder, "float16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_stored_in_another_precision_are_cast(folder: Path, dtype: str) -> None:
    def to_half(weights: Weights) -> None:
        weights.update({name: weight.half() for name, weight in weights.items()})

    edit(folder, to_half)
    model, _ = load_model(folder, dtype)
    assert model.dtype == getattr(torch, dtype)
