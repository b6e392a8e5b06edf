"""Converted models mean the same as the originals: judged by transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton.store import DEFAULT_MODEL, ModelStore, StoredModel, open_store
from baton.store.gguf_rope import llama3_divisors
from tests.support.models_on_disk import CONFIG, as_bf16, write_gguf

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
TEXTS = (
    *("Hello world", " lead", "trail  ", "a  b   c\n\n\td", "12345 1,234.56", "don't I'M we'll"),
    *(
        "naïve café 日本語 😀👩‍👩‍👧",
        "def f(x):\n    return x**2  # ok",
        "\r\n\x00\x7f",
        "   ",
        "①²½ Ⅷ",
    ),
    "<|im_start|>user\nhi<|im_end|>\n",
)


def random_model(family: str, **config: Any) -> Any:
    """A tiny model whose weights bf16 holds exactly."""
    from transformers import AutoConfig

    torch.manual_seed(0)
    settings = {**CONFIG, "initializer_range": 0.3, "tie_word_embeddings": False, **config}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
            parameter.copy_(torch.from_numpy(as_bf16(parameter.numpy())))
    return model


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(40).reshape(1, -1) % CONFIG["vocab_size"]
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize(
    ("family", "keys", "config"),
    [
        ("llama", {}, {}),
        ("llama", {"llama.rope.freq_base": 500000.0}, {"rope_parameters": LLAMA3}),
        ("qwen2", {}, {}),
        ("qwen3", {}, {}),
        ("mistral", {"llama.attention.sliding_window": 16}, {"sliding_window": 16}),
        (
            "llama",
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        ),
    ],
)
def test_a_model_taken_through_gguf_computes_the_same_logits(
    tmp_path: Path, family: str, keys: dict[str, Any], config: dict[str, Any]
) -> None:
    """Wrongly ordered q and k rows give other logits from the second position on."""
    original = random_model(family, **config)
    weights = {name: value.numpy() for name, value in original.state_dict().items()}
    extra = {}
    if config.get("rope_parameters") == LLAMA3:
        divisors = llama3_divisors(500000.0, CONFIG["head_dim"], 8.0, 8192)
        extra["rope_freqs.weight"] = np.array(divisors, np.float32)
    architecture = "llama" if family == "mistral" else family
    path = write_gguf(tmp_path / "m.gguf", weights, architecture, keys=keys, extra=extra)
    stored = ModelStore(tmp_path / "home").resolve(str(path))
    converted = AutoModelForCausalLM.from_pretrained(stored.path, dtype=torch.float32)
    assert converted.config.model_type == family
    torch.testing.assert_close(logits(converted), logits(original), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def smollm2() -> StoredModel:
    return open_store(progress=False).resolve(DEFAULT_MODEL)


@pytest.mark.model
def test_smollm2_names_the_capital_of_france(smollm2: StoredModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2.path)
    model = AutoModelForCausalLM.from_pretrained(smollm2.path)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0]
    answer = tokenizer.decode(output[prompt["input_ids"].shape[1] :])
    assert "Paris" in answer and answer.endswith("<|im_end|>")


@pytest.mark.model
def test_smollm2_special_tokens_have_their_published_ids(smollm2: StoredModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2.path)
    ids = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    assert tokenizer("".join(ids))["input_ids"] == list(ids.values())
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert len(tokenizer) == 49152


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_gives_text_back(smollm2: StoredModel, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2.path)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
