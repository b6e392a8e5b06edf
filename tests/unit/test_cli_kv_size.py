"""`baton kv-size`: known answers and wrong questions."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.cli.kv_size import Question, answer, parse_params
from baton.cluster.errors import SettingsError
from tests.support.families import EXTRA, SIZES

SMOLLM2 = {"layers": 30, "kv_heads": 3, "head_dim": 64}
LLAMA_2_70B = {"layers": 80, "head_dim": 128, "tokens": 4096}


def ask(**changes: Any) -> str:
    return "\n".join(answer(Question(**changes)))


def folder(path: Path, weight_bytes: int = 0, **config: Any) -> str:
    (path / "config.json").write_text(json.dumps({**SIZES, **config}))
    if weight_bytes:
        (path / "model.safetensors").write_bytes(bytes(weight_bytes))
    return str(path)


def test_smollm2_takes_23040_bytes_per_token_in_bf16() -> None:
    assert "2 · 30 · 1 · 3 · 64 · 2 = 23,040 B" in ask(**SMOLLM2)


def test_gpt3_takes_4_72_megabytes_per_token_in_fp16() -> None:
    shown = ask(layers=96, kv_heads=96, head_dim=128, dtype="fp16", tokens=1)
    assert "4,718,592 B = 4.72 MB" in shown


def test_llama2_70b_takes_1_34_gigabytes_at_4096_tokens_and_eight_times_that_as_mha() -> None:
    assert "= 1.34 GB" in ask(kv_heads=8, **LLAMA_2_70B)
    assert "= 10.7 GB" in ask(kv_heads=64, **LLAMA_2_70B)


def test_llama3_70b_is_8_times_below_a_model_without_grouped_heads(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 80, "hidden_size": 8192, "head_dim": 128}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8}
    shown = ask(model=folder(tmp_path, model_type="llama", **sizes, **heads), tokens=4096)
    assert "8x below 64 heads with KV of their own" in shown
    assert "= 1.34 GB" in shown


def test_the_latent_of_deepseek_v2_is_576_values_per_layer_and_token(tmp_path: Path) -> None:
    given = ask(layers=27, latent=576)
    lite = {**EXTRA["deepseek_v2"], "num_hidden_layers": 27, "num_attention_heads": 16}
    lite |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
    read = ask(model=folder(tmp_path, model_type="deepseek_v2", **lite))
    for shown in (given, read):
        assert "576 values per layer and token" in shown
        assert "27 · 1 · 576 · 2 = 31,104 B" in shown


def test_the_answer_shows_the_formula_with_its_numbers() -> None:
    shown = ask(**SMOLLM2, params="135M", memory="1GiB")
    assert "2 · layers · tokens · kv heads · head dim · bytes per value" in shown
    assert "94,371,840 B = 94.4 MB (90.0 MiB)" in shown
    assert "11 sequences of 4,096 tokens, or 46,603 tokens in all" in shown
    assert "270 MB: the cache outgrows them beyond 11,718 tokens" in shown


@pytest.mark.parametrize(
    ("kind", "block", "share", "tail"),
    [
        ("fp8", "3,072 + 3,072 + 488 = 6,632 B", "0.540", 2),
        ("int8", "3,072 + 3,072 + 480 = 6,624 B", "0.539", 2),
        ("int4", "1,536 + 1,536 + 720 = 3,792 B", "0.309", 4),
    ],
)
def test_a_quantized_cache_counts_its_scales_and_the_newest_tokens(
    kind: str, block: str, share: str, tail: int
) -> None:
    shown = ask(**SMOLLM2, kv_dtype=kind, tokens=100, memory="64MiB")
    row = int(block.split("= ")[1].removesuffix(" B").replace(",", ""))
    one = (7 + tail) * 30 * row
    assert block in shown and f"{share} of bfloat16" in shown
    assert f"{tail} blocks more per sequence" in shown
    assert f"{one:,} B" in shown, "100 tokens are 7 blocks of 16"
    assert f"{(64 << 20) // one:,} sequences of 100 tokens" in shown


def test_with_a_window_a_sequence_stops_growing(tmp_path: Path) -> None:
    model = folder(tmp_path, model_type="mistral", sliding_window=100)
    long, longer = (ask(model=model, tokens=n).splitlines() for n in (1000, 9000))
    assert "100: at most 128 tokens are kept" in long[3]
    assert long[4].split()[2:] == longer[4].split()[2:]
    assert "window" not in ask(model=model, tokens=90)


def test_a_model_folder_gives_shape_and_weights(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = folder(tmp_path, 2560, model_type="llama", hidden_size=32, **sizes)
    shown = ask(model=model, dtype="fp32", tokens=10)
    assert "2 · 2 · 1 · 4 · 8 · 4 = 512 B" in shown
    assert "beyond 5 tokens" in shown
    assert "2 · 2 · 1 · 1 · 8 · 4 = 128 B" in ask(model=model, dtype="fp32", kv_heads=1)


def test_without_a_number_of_parameters_nothing_is_said_of_weights() -> None:
    assert "weights" not in ask(**SMOLLM2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": 3}, "Give all of --layers, --kv-heads and --head-dim"),
        ({"latent": 3}, "or --layers and --latent"),
        ({"dtype": "int3"}, "--dtype must be one of bfloat16"),
        ({"kv_dtype": "int3"}, "--kv-dtype must be one of auto, fp8, int8, int4"),
        ({**SMOLLM2, "head_dim": 63, "kv_dtype": "int4"}, "head_dim (63) must be even"),
        ({"layers": 3, "latent": 576, "kv_dtype": "int8"}, "a cache of latents cannot be int8"),
        ({**SMOLLM2, "memory": "x"}, "--memory must be a size"),
        ({**SMOLLM2, "params": "x"}, "--params must be a number"),
        ({"model": "/no/such/model"}, "/no/such/model"),
    ],
)
def test_a_wrong_question_is_a_sentence(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        ask(**changes)
    assert said in str(caught.value)


def test_a_model_that_is_not_supported_says_so_and_asks_for_numbers(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"'bloom' is not supported.*or give --layers"):
        ask(model=folder(tmp_path, model_type="bloom"))


def test_numbers_of_parameters_are_read_with_their_unit() -> None:
    assert [parse_params(text) for text in ("135M", "1.5b", "70B", "42")] == [
        135_000_000,
        1_500_000_000,
        70_000_000_000,
        42,
    ]


def test_a_policy_counts_what_is_kept_and_its_states() -> None:
    """Of 4,096 tokens: 1,024; 512, one that comes, and two blocks of states."""
    snapkv = ask(**SMOLLM2, kv_policy="snapkv(budget=0.25)")
    assert "1,024 of 4,096 tokens are kept" in snapkv and f"{1024 * 23040:,} B" in snapkv
    h2o = ask(**SMOLLM2, kv_policy="h2o(budget=512)")
    assert "with the states of 513" in h2o and f"{(33 + 2) * 16 * 23040:,} B" in h2o
    assert "1,072 of 8,192" in ask(**SMOLLM2, kv_policy="streaming", tokens=8192)


@pytest.mark.parametrize("policy", ["lru", "streaming(window=0)", "snapkv(budget=101%)"])
def test_a_wrong_policy_is_a_sentence(policy: str) -> None:
    with pytest.raises(SettingsError, match="--kv-policy: "):
        ask(**SMOLLM2, kv_policy=policy)
