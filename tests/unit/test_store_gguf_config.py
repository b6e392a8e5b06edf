"""config.json out of GGUF metadata, and the models that it cannot describe."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.store.errors import StoreError
from baton.store.gguf_config import model_config
from baton.store.gguf_file import read_gguf
from baton.store.gguf_rope import llama3_divisors
from baton.store.gguf_weights import read_floats
from tests.support.models_on_disk import CONFIG, random_weights, write_gguf


def config_of(path: Path) -> dict[str, Any]:
    file = read_gguf(path)
    return model_config(file, read_floats(file, "rope_freqs.weight"))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_sizes_are_those_of_the_metadata(tmp_path: Path, family: str) -> None:
    config = config_of(write_gguf(tmp_path / "m.gguf", family=family))
    assert config.items() >= {**CONFIG, "model_type": family}.items()
    assert config["tie_word_embeddings"] is True
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}


def test_an_output_matrix_means_untied_embeddings(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", random_weights(tied=False))
    assert config_of(path)["tie_word_embeddings"] is False


def test_left_out_values_have_their_defaults(tmp_path: Path) -> None:
    names = ("attention.head_count_kv", "attention.key_length", "attention.value_length")
    drop = tuple(f"llama.{name}" for name in (*names, "rope.freq_base"))
    config = config_of(write_gguf(tmp_path / "m.gguf", drop=drop))
    assert (config["num_key_value_heads"], config["head_dim"]) == (4, 8)
    assert config["rope_theta"] == 10000.0


def test_a_sliding_window_makes_a_llama_file_a_mistral(tmp_path: Path) -> None:
    config = config_of(write_gguf(tmp_path / "m.gguf", keys={"llama.attention.sliding_window": 64}))
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 64)


def test_float32_metadata_is_read_as_the_decimal_that_was_meant(tmp_path: Path) -> None:
    assert config_of(write_gguf(tmp_path / "m.gguf"))["rms_norm_eps"] == 1e-5


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 64,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        ({"llama.rope.scaling.type": "none"}, {"rope_type": "default"}),
    ],
)
def test_rope_scaling_keys_become_rope_parameters(
    tmp_path: Path, keys: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = config_of(write_gguf(tmp_path / "m.gguf", keys=keys))
    assert config["rope_parameters"] == {"rope_theta": 10000.0, **expected}


@pytest.mark.parametrize(("factor", "context"), [(8.0, 8192), (32.0, 8192), (4.0, 4096)])
def test_llama3_factors_give_back_the_parameters_they_were_made_of(
    tmp_path: Path, factor: float, context: int
) -> None:
    divisors = np.array(llama3_divisors(500000.0, 8, factor, context), np.float32)
    path = write_gguf(
        tmp_path / "m.gguf",
        keys={"llama.rope.freq_base": 500000.0},
        extra={"rope_freqs.weight": divisors},
    )
    parameters = config_of(path)["rope_parameters"]
    # Contexts that give the same divisors for so few frequencies are equally right.
    found = parameters["original_max_position_embeddings"]
    assert llama3_divisors(500000.0, 8, factor, found) == pytest.approx(divisors, rel=1e-3)
    assert (parameters["rope_type"], parameters["factor"]) == ("llama3", factor)
    assert (parameters["low_freq_factor"], parameters["high_freq_factor"]) == (1.0, 4.0)


def test_llama3_divisors_are_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    entry = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=128, num_attention_heads=1, rope_parameters=entry)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1 / 500000.0 ** (np.arange(0, 128, 2) / 128)
    ours = plain / np.array(llama3_divisors(500000.0, 128, 8.0, 8192))
    np.testing.assert_allclose(ours, scaled.numpy(), rtol=1e-5)


def test_other_rope_factors_are_refused(tmp_path: Path) -> None:
    odd = np.array([1.0, 3.0, 2.0, 7.0], np.float32)
    path = write_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": odd})
    with pytest.raises(StoreError, match=r"that are not Llama 3's; use the model's Hugging Face"):
        config_of(path)


def test_a_tuned_yarn_is_refused(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "yarn_beta_fast": 8.0}
    keys = {f"llama.rope.scaling.{key}": value for key, value in scaling.items()}
    with pytest.raises(StoreError, match="tunes YaRN by yarn_beta_fast"):
        config_of(write_gguf(tmp_path / "m.gguf", keys=keys))


def test_an_unsupported_architecture_lists_the_supported_ones(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", keys={"general.architecture": "gemma3"})
    with pytest.raises(StoreError, match=r"'gemma3'.*llama, mistral, qwen2, qwen3"):
        config_of(path)


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale"),
        ({"llama.rope.dimension_count": 4}, "rotary embedding of a part"),
        ({"llama.attention.value_length": 4}, "value heads of another size"),
        ({"llama.attention.head_count": [4, 2]}, "head_count = "),
        ({"llama.attention.head_count_kv": 3}, "impossible sizes"),
        ({"llama.attention.head_count": 0}, "without attention"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "'longrope'"),
    ],
)
def test_variants_of_a_family_are_refused(tmp_path: Path, keys: dict[str, Any], what: str) -> None:
    with pytest.raises(StoreError, match=f"{what}.*not supported"):
        config_of(write_gguf(tmp_path / "m.gguf", keys=keys))


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", drop=("llama.block_count",))
    with pytest.raises(StoreError, match=r"lacks the metadata 'llama\.block_count'"):
        config_of(path)


def test_missing_embeddings_are_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", drop=("token_embd.weight",))
    with pytest.raises(StoreError, match="no token embeddings"):
        config_of(path)
