"""What config.json may say, in both spellings, and what is refused by name."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from baton.engine.kv_layout import KVLayout
from baton.engine.model_config import ModelConfig
from baton.engine.rope_config import RopeConfig
from tests.support.families import EXTRA, SIZES, hf_config, reference_model

SLIDING = ["sliding_attention"] * 3
DEEPSEEK = {"model_type": "deepseek_v2", **EXTRA["deepseek_v2"]}


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
        (
            {"model_type": "bloom"},
            "model_type 'bloom' is not supported; supported are deepseek_v2, gemma, gemma2, "
            "gemma3_text, gpt2, llama, mistral, mixtral, phi3, qwen2, qwen3",
        ),
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
        ({"model_type": "gpt2", "scale_attn_weights": False}, "scale_attn_weights False"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx"),
        ({"model_type": "phi3", "rope_scaling": {"type": "su"}}, "'su' of Phi-3"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.375}, "must be even, not 3"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types names 1"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "bidirectional"),
        ({"model_type": "gemma2", "sliding_window": None, "layer_types": SLIDING}, "not set"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"model_type": "mixtral", "num_local_experts": 0}, "num_local_experts must be"),
        (
            {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3},
            "num_experts_per_tok (3) is beyond the 2 experts",
        ),
        ({"model_type": "deepseek_v2", "norm_topk_prob": True}, "norm_topk_prob True"),
        ({"model_type": "deepseek_v2", "topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        (DEEPSEEK | {"qk_rope_head_dim": 0}, "qk_rope_head_dim must be a positive whole number"),
    ],
)
def test_an_unsupported_config_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
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


def test_deepseek_v2_lite_caches_576_values_per_layer_and_token() -> None:
    lite = config(
        model_type="deepseek_v2",
        num_attention_heads=16,
        num_key_value_heads=16,
        num_hidden_layers=27,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
    )
    layout = KVLayout.of(lite, 16)
    assert layout.layer_kinds == ("latent",) * 27
    assert layout.unit_shape(1, 1) == (1, 1, 1, 16, 1, 576)
    assert layout.bytes_per_token == 27 * 576 * 2


def test_older_gemma_files_say_their_layers_by_a_pattern() -> None:
    sizes = {"num_hidden_layers": 6, "sliding_window": 9}
    assert config(model_type="gemma2", **sizes).windows == (9, None) * 3
    gemma3 = config(
        model_type="gemma3_text",
        **sizes,
        sliding_window_pattern=3,
        rope_theta=1e6,
        rope_local_base_freq=2e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    assert gemma3.windows == (9, 9, None) * 2
    assert gemma3.rope == RopeConfig("linear", 1e6, 8.0, 128)
    assert gemma3.window_rope == RopeConfig(theta=2e4, original_max_position=128)


def test_parameters_are_counted_as_the_reference_counts_them() -> None:
    """Matrices only: norms, biases and the row of a router's bias are left out."""
    for family in ("llama", "gpt2", "gemma2", "phi3", "mixtral", "deepseek_v2"):
        reference = reference_model(family)
        seen = {w.data_ptr(): w.numel() for w in reference.parameters() if w.dim() > 1}
        ours = ModelConfig.from_hf(hf_config(reference)).num_parameters
        assert ours == sum(seen.values()), family


def test_a_layout_of_an_unknown_dtype_or_no_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype must be one of"):
        KVLayout.of(config(), 4, "float16")
    with pytest.raises(ValueError, match="block_size must be at least 1"):
        KVLayout.of(config(), 0)
