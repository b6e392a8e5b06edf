"""A tiny random Llama that speaks bytes: fast enough for hundreds of requests over real workers.

Token ids below 256 are bytes (see `byte_model`), so prompts and answers are arbitrary bytes.
"""

import json
from pathlib import Path

import torch

from baton.store import StoredModel
from tests.support.byte_model import IM_END, VOCAB_SIZE, byte_tokenizer, write_byte_model

MAX_MODEL_LEN = 2048


def write_tiny_chat(path: Path, seed: int = 0, hidden_size: int = 32) -> StoredModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    write_byte_model(path)
    torch.manual_seed(seed)
    eos = byte_tokenizer().token_to_id(IM_END)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=False,
        eos_token_id=eos,
        initializer_range=0.5,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return StoredModel("tiny-chat", path, f"tiny-chat-{seed}")
