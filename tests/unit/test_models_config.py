"""What config.json may say, in both spellings, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.engine.kv_layout import KVLayout
from baton.engine.model_config import ModelConfig, RopeConfig
from tests.support.families import SIZES


def config(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({"model_type": "llama", **SIZES, **changes})


def test_both_spellings_of_the_rope_settings_mean_the_same() -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 32}
    old = config(rope_theta=5e4, rope_scaling={"type": "yarn", **scaling})
    new = config(rope_parameters={"rope_type": "yarn", "rope_theta": 5e4, **scaling})
    assert old == new
    assert old.rope == RopeConfig("yarn", 5e4, 4.0, 32)


def test_absent_optional_keys_take_the_defaults_of_the_family() -> None:
    bare = {k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "head_dim")}
    llama = ModelConfig.from_hf({"model_type": "llama", **bare})
    assert (llama.num_kv_heads, llama.head_dim, llama.rope.theta) == (6, 8, 10000.0)
    assert ModelConfig.from_hf({"model_type": "qwen3", **bare}).head_dim == 128
    assert ModelConfig.from_hf({"model_type": "mistral", **bare}).windows == (4096,) * 3
    qwen2 = ModelConfig.from_hf({"model_type": "qwen2", **bare, "sliding_window": 64})
    assert qwen2.windows == (None,) * 3
    assert qwen2.qkv_bias and not qwen2.o_bias


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq'"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs 'factor'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs 'low_freq_factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_size": None}, "hidden_size must be a positive whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive whole number"),
        ({"vocab_size": "many"}, "vocab_size must be a positive whole number, not 'many'"),
        ({"num_key_value_heads": 4}, "not a multiple of num_key_value_heads"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window must be at least 1"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types names 1 layers"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 3}, "use_sliding_window"),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"] * 3}, "linear_attention"),
    ],
)
def test_an_unsupported_config_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        config(**changes)


def test_end_tokens_come_from_the_generation_config_when_it_has_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (2, 7)


def test_a_folder_without_a_config_or_with_a_broken_one_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        ModelConfig.from_dir(tmp_path)


SMOLLM2 = {"num_hidden_layers": 30, "num_key_value_heads": 3, "head_dim": 64}
LLAMA_2_70B = {"num_hidden_layers": 80, "num_key_value_heads": 8, "head_dim": 128}


@pytest.mark.parametrize(
    ("changes", "dtype", "expected"),
    [
        ({**SMOLLM2, "num_attention_heads": 9}, "bfloat16", 23_040),
        ({**SMOLLM2, "num_attention_heads": 9}, "float32", 46_080),
        ({**LLAMA_2_70B, "num_attention_heads": 64}, "bfloat16", 327_680),
    ],
)
def test_bytes_per_token_are_the_known_answers(
    changes: dict[str, Any], dtype: str, expected: int
) -> None:
    layout = KVLayout.of(config(**changes), 16, dtype)
    assert layout.bytes_per_token == expected
    assert layout.bytes_per_block == 16 * expected


def test_a_layout_says_which_layers_have_a_window() -> None:
    mixed = config(
        model_type="qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=2
    )
    assert KVLayout.of(mixed, 4).layer_kinds == ("full", "full", "window")


def test_a_layout_of_an_unknown_dtype_or_no_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype must be one of"):
        KVLayout.of(config(), 4, "float16")
    with pytest.raises(ValueError, match="block_size must be at least 1"):
        KVLayout.of(config(), 0)
