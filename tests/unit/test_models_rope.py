"""The scaled frequencies against transformers, at the sizes of released models."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from baton.engine.layers.rotary import RotaryEmbedding, inverse_frequencies
from baton.engine.rope_config import RopeConfig

LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
CASES: list[dict[str, Any]] = [
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    {**LLAMA3, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192},
    {**LLAMA3, "low_freq_factor": 2.0, "original_max_position_embeddings": 64},
    {**YARN, "original_max_position_embeddings": 32768},
    {**YARN, "original_max_position_embeddings": 32768, "truncate": False},
    {**YARN, "original_max_position_embeddings": 4096, "beta_fast": 64.0, "beta_slow": 2.0},
    {**YARN, "original_max_position_embeddings": 2**40, "rope_theta": 10.0},
    {**YARN, "original_max_position_embeddings": 16},
    {**YARN, "original_max_position_embeddings": 4096, "attention_factor": 0.8},
    {**YARN, "original_max_position_embeddings": 4096, "mscale": 0.7, "mscale_all_dim": 1.2},
    {**YARN, "original_max_position_embeddings": 4096, "factor": 1.0},
]


@pytest.mark.parametrize("params", CASES, ids=lambda params: params["rope_type"])
def test_scaled_frequencies_and_attention_factor_are_those_of_the_reference(
    params: dict[str, Any],
) -> None:
    config = LlamaConfig(
        hidden_size=1024,
        num_attention_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rope_parameters=dict(params),
    )
    theirs, their_scale = ROPE_INIT_FUNCTIONS[params["rope_type"]](config, device="cpu")
    ours, our_scale = inverse_frequencies(RopeConfig.from_hf(config.to_dict()), 128)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert our_scale == pytest.approx(their_scale)


def test_the_attention_factor_scales_cosine_and_sine() -> None:
    config = RopeConfig("yarn", factor=4.0, original_max_position=64, attention_factor=2.0)
    cos, sin = RotaryEmbedding(config, 8)(torch.tensor([0, 11]), torch.float32)
    torch.testing.assert_close(cos.square() + sin.square(), torch.full_like(cos, 4.0))


def test_an_unknown_scaling_is_refused() -> None:
    with pytest.raises(ValueError, match="'spiral' is not supported"):
        inverse_frequencies(RopeConfig("spiral"), 8)
