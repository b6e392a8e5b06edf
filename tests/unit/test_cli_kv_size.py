"""`baton kv-size`: known answers and wrong questions."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.cli.kv_size import KVShape, Question, answer, decimal, parse_params, shape_of
from baton.cluster.errors import SettingsError

QUESTION = Question(None, None, None, None, "bfloat16", 4096, None, "512MiB")


def ask(**changes: Any) -> str:
    return "\n".join(answer(replace(QUESTION, **changes)))


def test_smollm2_takes_23040_bytes_per_token_in_bf16() -> None:
    assert KVShape(30, 3, 64, 2).bytes_per_token == 23_040


def test_gpt3_takes_4_72_megabytes_per_token_in_fp16() -> None:
    assert decimal(KVShape(96, 96, 128, 2).bytes_per_token) == "4.72 MB"


def test_llama2_70b_takes_1_34_gigabytes_at_4096_tokens_and_eight_times_that_as_mha() -> None:
    assert decimal(KVShape(80, 8, 128, 2).bytes_for(4096)) == "1.34 GB"
    assert decimal(KVShape(80, 64, 128, 2).bytes_for(4096)) == "10.7 GB"


def test_the_answer_shows_the_formula_with_its_numbers() -> None:
    shown = ask(layers=30, kv_heads=3, head_dim=64, params="135M", memory="1GiB")
    assert "2 · layers · tokens · kv heads · head dim · bytes per value" in shown
    assert "2 · 30 · 1 · 3 · 64 · 2 = 23,040 B" in shown
    assert "94,371,840 B = 94.4 MB (90.0 MiB)" in shown
    assert "11 sequences of 4,096 tokens, or 46,603 tokens in all" in shown
    assert "270 MB: the cache outgrows them beyond 11,718 tokens" in shown


def test_without_a_number_of_parameters_nothing_is_said_of_weights() -> None:
    assert "weights" not in ask(layers=30, kv_heads=3, head_dim=64)


def test_a_model_folder_gives_shape_and_weights(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(bytes(2560))
    shown = ask(model=str(tmp_path), dtype="fp32", tokens=10)
    assert "2 · 2 · 1 · 4 · 8 · 4 = 512 B" in shown
    assert "beyond 5 tokens" in shown


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ({"num_key_value_heads": 2}, KVShape(3, 2, 16, 2)),
        ({"num_key_value_heads": None}, KVShape(3, 4, 16, 2)),
        ({"num_key_value_heads": 1, "head_dim": 32}, KVShape(3, 1, 32, 2)),
    ],
)
def test_grouped_heads_and_explicit_head_sizes_are_read(
    config: dict[str, Any], shape: KVShape
) -> None:
    base = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64}
    assert shape_of(base | config, 2) == shape


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": 3}, "Give all of --layers, --kv-heads and --head-dim"),
        ({"dtype": "int3"}, "--dtype must be one of bfloat16"),
        ({"layers": 1, "kv_heads": 1, "head_dim": 1, "memory": "x"}, "--memory must be a size"),
        ({"layers": 1, "kv_heads": 1, "head_dim": 1, "params": "x"}, "--params must be a number"),
        ({"model": "/no/such/model"}, "/no/such/model"),
    ],
)
def test_a_wrong_question_is_a_sentence(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        ask(**changes)
    assert said in str(caught.value)


def test_a_config_without_heads_asks_for_them() -> None:
    with pytest.raises(SettingsError, match="give --layers"):
        shape_of({"num_hidden_layers": 3}, 2)


def test_numbers_of_parameters_are_read_with_their_unit() -> None:
    assert [parse_params(text) for text in ("135M", "1.5b", "70B", "42")] == [
        135_000_000,
        1_500_000_000,
        70_000_000_000,
        42,
    ]
