"""Weights out of GGUF: every quantization, the q/k layout, names, and damage."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGML_QUANT_SIZES

from baton.store.errors import StoreError
from baton.store.gguf_file import read_gguf
from baton.store.gguf_import import GGUFImporter
from baton.store.gguf_weights import TensorPlan, stream_bf16, unpermute
from baton.store.safetensors_file import TensorSpec
from tests.support.models_on_disk import (
    permute,
    random_weights,
    read_safetensors,
    write_gguf,
)

QUANTIZABLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
TERNARY_AND_FP4 = ("TQ1_0", "TQ2_0", "MXFP4")
READ_ONLY = (
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S"),
    *("IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "NVFP4"),
)
TOLERANCE = {"F32": 0.004, "F16": 0.004, "BF16": 0.004, "Q8_0": 0.02}
ROWS, COLUMNS = 24, 512


def convert_tensor(path: Path, raw: np.ndarray, kind: Type) -> np.ndarray:
    """One tensor through a file and our reader."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    info = read_gguf(path).tensors["x"]
    plan = TensorPlan(TensorSpec("x", "BF16", info.shape), info, head_dim=0)
    with path.open("rb") as stream:
        bits = np.frombuffer(b"".join(stream_bf16(stream, path, plan)), np.uint16)
    return (bits.astype(np.uint32) << 16).view(np.float32).reshape(info.shape)


def to_bf16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.array(values, np.float32)).bfloat16().float().numpy()


def finite_blocks(kind: Type) -> np.ndarray:
    """Random blocks whose scales happen to be sane numbers."""
    size, size_bytes = GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(3).integers(0, 256, (4000, size_bytes), np.uint8)
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(blocks, kind)
    sane = np.isfinite(values).all(axis=1) & (np.abs(values).max(axis=1) < 1e6)
    return blocks[sane][: ROWS * COLUMNS // size].reshape(ROWS, -1)


@pytest.mark.parametrize("name", QUANTIZABLE)
def test_values_survive_each_quantization_within_its_tolerance(tmp_path: Path, name: str) -> None:
    values = np.random.default_rng(2).uniform(-1, 1, (ROWS, COLUMNS)).astype(np.float32)
    raw = gguf.quants.quantize(values, Type[name])
    converted = convert_tensor(tmp_path / "x.gguf", raw, Type[name])
    assert np.abs(converted - values).max() < TOLERANCE.get(name, 0.15)


@pytest.mark.parametrize("name", QUANTIZABLE + TERNARY_AND_FP4)
def test_rounding_to_bf16_is_that_of_torch(tmp_path: Path, name: str) -> None:
    values = np.random.default_rng(2).normal(size=(ROWS, COLUMNS)).astype(np.float32)
    raw = gguf.quants.quantize(values, Type[name])
    expected = to_bf16(gguf.quants.dequantize(raw, Type[name]))
    np.testing.assert_array_equal(convert_tensor(tmp_path / "x.gguf", raw, Type[name]), expected)


@pytest.mark.parametrize("name", READ_ONLY)
def test_formats_without_a_quantizer_are_read_as_the_gguf_package_does(
    tmp_path: Path, name: str
) -> None:
    raw = finite_blocks(Type[name])
    expected = to_bf16(gguf.quants.dequantize(raw, Type[name]))
    assert expected.shape == (ROWS, COLUMNS)
    np.testing.assert_array_equal(convert_tensor(tmp_path / "x.gguf", raw, Type[name]), expected)


def test_every_format_that_the_gguf_package_reads_is_tested_here() -> None:
    known = {kind.name for kind in gguf.quants._type_traits} | {"F32", "F16"}
    assert known <= {*QUANTIZABLE, *TERNARY_AND_FP4, *READ_ONLY}


def test_a_tensor_of_many_chunks_is_whole(tmp_path: Path) -> None:
    values = np.arange(1200 * 500, dtype=np.float32).reshape(1200, 500)
    converted = convert_tensor(tmp_path / "x.gguf", values, Type.F32)
    np.testing.assert_array_equal(converted, to_bf16(values))


def test_unpermute_undoes_what_the_llama_converter_does() -> None:
    rows = np.arange(6 * 16 * 3, dtype=np.float32).reshape(6 * 16, 3)
    np.testing.assert_array_equal(unpermute(permute(rows, 6), 16), rows)
    assert not np.array_equal(permute(rows, 6), rows)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_weight_comes_back_under_its_hugging_face_name(
    tmp_path: Path, family: str, tied: bool
) -> None:
    weights = random_weights(family, tied)
    importer = GGUFImporter(write_gguf(tmp_path / "m.gguf", weights, family))
    importer.write(tmp_path, lambda _: None)
    converted = read_safetensors(tmp_path / "model.safetensors")
    assert converted.keys() == weights.keys()
    for name, values in weights.items():
        np.testing.assert_array_equal(converted[name], values, err_msg=name)


def test_progress_adds_up_to_the_announced_work(tmp_path: Path) -> None:
    importer = GGUFImporter(write_gguf(tmp_path / "m.gguf"))
    done: list[int] = []
    importer.write(tmp_path, done.append)
    assert sum(done) == importer.work_bytes == importer.needed_bytes(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", drop=("blk.1.ffn_up.weight",))
    with pytest.raises(StoreError, match=r"lacks the tensor 'blk\.1\.ffn_up\.weight'"):
        GGUFImporter(path)


def test_a_tensor_that_the_family_does_not_have_is_refused_rather_than_ignored(
    tmp_path: Path,
) -> None:
    path = write_gguf(tmp_path / "m.gguf", extra={"blk.0.ffn_up.bias": np.zeros(64, np.float32)})
    with pytest.raises(StoreError, match=r"blk\.0\.ffn_up\.bias.*variant that is not supported"):
        GGUFImporter(path)


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    weights = random_weights()
    weights["model.layers.0.self_attn.v_proj.weight"] = np.zeros((8, 32), np.float32)
    with pytest.raises(StoreError, match=r"attn_v.*\(8, 32\) instead of \(16, 32\)"):
        GGUFImporter(write_gguf(tmp_path / "m.gguf", weights))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_no_number_means_damage(tmp_path: Path, value: float) -> None:
    weights = random_weights()
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = value
    importer = GGUFImporter(write_gguf(tmp_path / "m.gguf", weights))
    with pytest.raises(StoreError, match=r"damaged: tensor 'blk\.1\.ffn_down\.weight'"):
        importer.write(tmp_path, lambda _: None)


def test_an_unreadable_number_format_is_refused_with_an_alternative(tmp_path: Path) -> None:
    weights = {**random_weights(), "model.norm.weight": np.ones(32, np.float64)}
    importer = GGUFImporter(write_gguf(tmp_path / "m.gguf", weights))
    with pytest.raises(StoreError, match=r"format F64, which cannot be read; get a conversion"):
        importer.write(tmp_path, lambda _: None)


def test_one_part_of_a_split_file_is_refused_with_the_way_to_join_them(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", keys={"split.count": 3})
    with pytest.raises(StoreError, match=r"one of 3 parts; join them first with"):
        GGUFImporter(path)
