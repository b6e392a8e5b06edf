"""config.json from GGUF metadata. What the served families cannot express is refused here."""

from collections.abc import Sequence
from typing import Any

from baton.store.errors import StoreError
from baton.store.families import SUPPORTED_IN_GGUF, require_family
from baton.store.gguf_file import GGUFFile
from baton.store.gguf_metadata import Metadata
from baton.store.gguf_rope import rope_parameters

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_MUST_BE_NEUTRAL = {
    "expert_count": 0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
    "attention.scale": 0.0,
    "final_logit_softcapping": 0.0,
}


def model_config(file: GGUFFile, rope_freqs: Sequence[float]) -> dict[str, Any]:
    """The Hugging Face config of the model in `file`."""
    metadata = Metadata(file)
    require_family(metadata.architecture, file.path, SUPPORTED_IN_GGUF)
    _refuse_variants(metadata)
    heads = metadata.param("attention.head_count")
    config = {
        **_family(metadata, file),
        "hidden_size": metadata.param("embedding_length"),
        "intermediate_size": metadata.param("feed_forward_length"),
        "num_hidden_layers": metadata.param("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.param("attention.head_count_kv", heads),
        "head_dim": _head_dim(metadata, heads),
        "hidden_act": "silu",
        "max_position_embeddings": metadata.param("context_length"),
        "rms_norm_eps": metadata.real("attention.layer_norm_rms_epsilon"),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": "bfloat16",
    }
    _check_sizes(metadata, config)
    rope = rope_parameters(metadata, config["head_dim"], rope_freqs)
    return {**config, "rope_theta": rope["rope_theta"], "rope_parameters": rope}


def _family(metadata: Metadata, file: GGUFFile) -> dict[str, Any]:
    """GGUF calls Mistral `llama`; only a sliding window tells them apart."""
    family = metadata.architecture
    window = metadata.param("attention.sliding_window", 0)
    entry: dict[str, Any] = {}
    if family in ("llama", "mistral") and window:
        family, entry["sliding_window"] = "mistral", window
    elif family == "mistral":
        entry["sliding_window"] = None
    elif window:
        raise _unsupported(metadata, f"a sliding window of {window}")
    elif family in ("llama", "qwen3"):
        entry["attention_bias"] = "blk.0.attn_output.bias" in file.tensors
    return {"architectures": [_CLASSES[family]], "model_type": family, **entry}


def _refuse_variants(metadata: Metadata) -> None:
    for key, neutral in _MUST_BE_NEUTRAL.items():
        if metadata.real(key, neutral) != neutral:
            raise _unsupported(metadata, f"{metadata.architecture}.{key}")


def _head_dim(metadata: Metadata, heads: int) -> int:
    if heads < 1:
        raise _unsupported(metadata, "a model without attention")
    head_dim = metadata.param("attention.key_length", metadata.param("embedding_length") // heads)
    if metadata.param("attention.value_length", head_dim) != head_dim:
        raise _unsupported(metadata, "value heads of another size than the key heads")
    if metadata.param("rope.dimension_count", head_dim) != head_dim:
        raise _unsupported(metadata, "rotary embedding of a part of each head")
    return head_dim


def _vocab_size(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise StoreError(f"{file.path} has no token embeddings, so it is incomplete; get it again.")
    return embedding.shape[0]


def _check_sizes(metadata: Metadata, config: dict[str, Any]) -> None:
    wrong = [key for key, value in config.items() if isinstance(value, int) and value < 0]
    wrong += [key for key in ("num_hidden_layers", "num_key_value_heads") if config[key] < 1]
    if wrong or config["num_attention_heads"] % config["num_key_value_heads"]:
        raise _unsupported(metadata, f"impossible sizes ({', '.join(wrong) or 'heads'})")


def _unsupported(metadata: Metadata, what: str) -> StoreError:
    return StoreError(
        f"{metadata.path} uses {what}, which is not supported; choose a plain model of its family."
    )
