"""Logits of every family against transformers, in float32, however the tokens are fed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.loader import load_model
from baton.store import resolve
from tests.support.families import (
    Rig,
    make_rig,
    random_tokens,
    reference_logits,
    reference_model,
)

TOLERANCE = 1e-3
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
WINDOWED = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, grouped heads": ("llama", {}),
    "llama, one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama, a kv head per head": ("llama", {"num_key_value_heads": 6}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, wide head": ("llama", {"head_dim": 32}),
    "llama, linear rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e3, "factor": 3.0}},
    ),
    "llama, dynamic rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn rope": ("llama", {"rope_parameters": YARN}),
    "llama, yarn with mscale": (
        "llama",
        {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9, "beta_fast": 16.0}},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window": ("mistral", {"sliding_window": 7}),
    "mistral, window of one": ("mistral", {"sliding_window": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied, one kv head": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2, windows from layer 1": ("qwen2", WINDOWED),
    "qwen2, yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {}),
    "qwen3, tied, biases": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3, mixed layers": (
        "qwen3",
        {
            **WINDOWED,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi3": ("phi3", {}),
    "phi3, window": ("phi3", {"sliding_window": 7}),
    "phi3, partly rotated": (
        "phi3",
        {
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "gpt2": ("gpt2", {}),
    "gpt2, untied, own inner size": ("gpt2", {"tie_word_embeddings": False, "n_inner": 56}),
    "gemma": ("gemma", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {"tie_word_embeddings": True}),
    "gemma2, tight caps": (
        "gemma2",
        {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.7, "sliding_window": 1},
    ),
    "gemma2, full layers only": ("gemma2", {"layer_types": ["full_attention"] * 3}),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 7}),
    "gemma3, two ropes, caps": (
        "gemma3_text",
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "final_logit_softcapping": 0.7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
            },
        },
    ),
    "mixtral": ("mixtral", {}),
    "mixtral, window, one expert": (
        "mixtral",
        {"sliding_window": 5, "num_experts_per_tok": 1},
    ),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2, query latent, scaled": (
        "deepseek_v2",
        {"q_lora_rank": 12, "attention_bias": True, "routed_scaling_factor": 1.7},
    ),
    "deepseek_v2, yarn, groups": (
        "deepseek_v2",
        {
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "first_k_dense_replace": 0,
        },
    ),
}


@pytest.fixture(params=VARIANTS, ids=lambda name: name.replace(", ", "-").replace(" ", "_"))
def pair(request: pytest.FixtureRequest) -> tuple[Any, Rig]:
    model_type, changes = VARIANTS[request.param]
    reference = reference_model(model_type, **changes)
    return reference, make_rig(reference)


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return (ours - theirs).abs().max().item()


def test_a_prompt_prefilled_at_once_has_the_logits_of_the_reference(pair: tuple[Any, Rig]) -> None:
    reference, rig = pair
    tokens = random_tokens(37)
    _, logits = rig.prefill(tokens)
    assert logits.dtype == torch.float32
    assert difference(logits[0], reference_logits(reference, tokens)[-1]) <= TOLERANCE


def test_a_prompt_prefilled_in_uneven_chunks_has_the_logits_of_the_reference(
    pair: tuple[Any, Rig],
) -> None:
    reference, rig = pair
    tokens = random_tokens(37)
    seq = rig.sequence(tokens)
    for chunk in (3, 9, 1, 20):
        assert rig.step((seq, chunk)).shape == (0, 101)
    logits = rig.step((seq, 4))
    assert difference(logits[0], reference_logits(reference, tokens)[-1]) <= TOLERANCE


def test_a_prompt_over_another_sequences_cached_blocks_has_the_logits_of_the_reference(
    pair: tuple[Any, Rig],
) -> None:
    reference, rig = pair
    shared = random_tokens(16, seed=1)
    first, _ = rig.prefill(shared + random_tokens(5, seed=2))
    tokens = shared + random_tokens(11, seed=3)
    second = rig.sequence(tokens)
    second.block_table[:4] = first.block_table[:4]
    second.num_computed_tokens = 16
    logits = rig.step((second, 11))
    assert difference(logits[0], reference_logits(reference, tokens)[-1]) <= TOLERANCE


def test_decode_steps_in_a_ragged_mixed_batch_have_the_logits_of_the_reference(
    pair: tuple[Any, Rig],
) -> None:
    """Three sequences of different lengths decode while a fourth is prefilled in chunks."""
    reference, rig = pair
    running = [rig.prefill(random_tokens(n, seed=n), room=12)[0] for n in (2, 15, 30)]
    prompt = random_tokens(24, seed=9)
    joining = rig.sequence(prompt)
    for step in range(6):
        for index, seq in enumerate(running):
            seq.token_ids.append(5 + 7 * step + index)
        logits = rig.step(*((seq, 1) for seq in running), (joining, 4))
        for index, seq in enumerate(running):
            theirs = reference_logits(reference, seq.token_ids)[-1]
            assert difference(logits[index], theirs) <= TOLERANCE
    assert difference(logits[3], reference_logits(reference, prompt)[-1]) <= TOLERANCE


def test_chunks_decode_steps_and_batches_change_no_bit_where_kernels_compute(
    pair: tuple[Any, Rig],
) -> None:
    _, rig = pair
    if not rig.runner.model.reads_in_place:
        pytest.skip("torch's sums depend on shapes")
    prompt = random_tokens(30)
    _, whole = rig.prefill(prompt)
    alone, among = rig.sequence(prompt), rig.sequence(prompt)
    others = [rig.prefill(random_tokens(n, seed=n), room=9)[0] for n in (2, 15, 31)]
    for count in (11, 1, 1, 16, 1):
        for seq in others:
            seq.token_ids.append(7)
        together = rig.step(*((seq, 1) for seq in others), (among, count))
        parts = rig.step((alone, count))
    assert torch.equal(parts, whole)
    assert torch.equal(together[3:], whole)


def test_a_model_saved_by_transformers_loads_with_the_same_logits(tmp_path: Path) -> None:
    """Both spellings of the config and sharded weights pass through the loader."""
    reference = reference_model("qwen3", tie_word_embeddings=True)
    reference.save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    model, _ = load_model(tmp_path, "float32")
    rig = make_rig(reference)
    rig.runner.model = model
    tokens = random_tokens(20)
    _, logits = rig.prefill(tokens)
    assert difference(logits[0], reference_logits(reference, tokens)[-1]) <= TOLERANCE


def test_bfloat16_errs_no_more_than_the_reference_does_in_bfloat16() -> None:
    reference = reference_model("llama", hidden_size=96, intermediate_size=160)
    rig = make_rig(reference, dtype=torch.bfloat16)
    prompts = [random_tokens(40, seed=s) for s in range(8)]
    exact = torch.stack([reference_logits(reference, p)[-1] for p in prompts])
    ours = torch.cat([rig.prefill(p)[1] for p in prompts])
    reference.bfloat16()
    theirs = torch.stack([reference_logits(reference, p)[-1] for p in prompts])
    assert (ours - exact).abs().mean() <= 1.25 * (theirs - exact).abs().mean()


@pytest.mark.model
def test_smollm2_has_the_logits_of_the_reference() -> None:
    from transformers import AutoModelForCausalLM

    from baton.engine.kv_cache import KVCache, KVLayout
    from baton.engine.model_runner import ModelRunner

    path = resolve("smollm2", progress=False).path
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model, config = load_model(path, "float32")
    runner = ModelRunner(model, KVCache(KVLayout.of(config, 16, "float32"), 40))
    rig = Rig(runner, list(range(0, 40, 2)) + list(range(1, 40, 2)))
    tokens = random_tokens(150, vocab=config.vocab_size)
    seq = rig.sequence(tokens, room=8)
    rig.step((seq, 70))
    logits = rig.step((seq, 80))
    assert difference(logits[0], reference_logits(reference, tokens)[-1]) <= TOLERANCE
    for token in (11, 4242, 30000):
        seq.token_ids.append(token)
        logits = rig.step((seq, 1))
        assert difference(logits[0], reference_logits(reference, seq.token_ids)[-1]) <= TOLERANCE
