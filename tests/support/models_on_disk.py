"""Small GGUF files and Hugging Face directories, written as the usual converters write them."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("1", "2"), ("Ġ", "Ġ"), ("i", "n"))
TOKENS = (*SPECIALS, "<tool>", *ALPHABET, *dict.fromkeys(a + b for a, b in MERGES))
TYPES = (3, 3, 3, 4, *(1 for _ in TOKENS[4:]))
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
STORED_FILES = {
    "baton.json",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}

Shapes = dict[str, tuple[int, ...]]
CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": len(TOKENS),
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[part]}.{suffix}"


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the q and k rows of the llama family."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def as_bf16(values: np.ndarray) -> np.ndarray:
    """The nearest values that bf16 holds, so that conversion must be exact."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


def random_weights(family: str = "llama", tied: bool = True) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    hidden, mlp, dim = 32, 64, 8
    layer: Shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (4 * dim, hidden),
        "self_attn.k_proj.weight": (2 * dim, hidden),
        "self_attn.v_proj.weight": (2 * dim, hidden),
        "self_attn.o_proj.weight": (hidden, 4 * dim),
        "mlp.gate_proj.weight": (mlp, hidden),
        "mlp.up_proj.weight": (mlp, hidden),
        "mlp.down_proj.weight": (hidden, mlp),
    }
    if family == "qwen2":
        layer |= {f"self_attn.{n}_proj.bias": (r * dim,) for n, r in (("q", 4), ("k", 2), ("v", 2))}
    if family == "qwen3":
        layer |= {f"self_attn.{n}_norm.weight": (dim,) for n in "qk"}
    shapes: Shapes = {"model.embed_tokens.weight": (len(TOKENS), hidden)}
    shapes |= {f"model.layers.{i}.{n}": shape for i in range(2) for n, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not tied:
        shapes["lm_head.weight"] = (len(TOKENS), hidden)
    return {n: as_bf16(rng.normal(size=s).astype(np.float32)) for n, s in shapes.items()}


def write_gguf(
    path: Path,
    weights: Mapping[str, np.ndarray] | None = None,
    family: str = "llama",
    *,
    quant: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    drop: tuple[str, ...] = (),
    keys: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """`drop` leaves out keys or tensors by GGUF name, `keys` and `extra` replace or add some."""
    weights = random_weights(family) if weights is None else weights
    writer = gguf.GGUFWriter(path, family)
    _write_keys(writer, {**_keys(family), **(keys or {})}, drop)
    for name, values in {gguf_name(n): v for n, v in weights.items()}.items():
        if name in drop:
            continue
        if family == "llama" and ".attn_q." in name:
            values = permute(values, CONFIG["num_attention_heads"])
        if family == "llama" and ".attn_k." in name:
            values = permute(values, CONFIG["num_key_value_heads"])
        if values.ndim == 1 or quant == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, quant), raw_dtype=quant)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _keys(family: str) -> dict[str, Any]:
    model = {
        "context_length": CONFIG["max_position_embeddings"],
        "embedding_length": CONFIG["hidden_size"],
        "block_count": CONFIG["num_hidden_layers"],
        "feed_forward_length": CONFIG["intermediate_size"],
        "attention.head_count": CONFIG["num_attention_heads"],
        "attention.head_count_kv": CONFIG["num_key_value_heads"],
        "attention.key_length": CONFIG["head_dim"],
        "attention.value_length": CONFIG["head_dim"],
        "attention.layer_norm_rms_epsilon": CONFIG["rms_norm_eps"],
        "rope.freq_base": 10000.0,
    }
    tokenizer = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": list(TOKENS),
        "tokenizer.ggml.token_type": list(TYPES),
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in MERGES],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
    return {**{f"{family}.{key}": value for key, value in model.items()}, **tokenizer}


def _write_keys(writer: gguf.GGUFWriter, keys: Mapping[str, Any], drop: tuple[str, ...]) -> None:
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in keys.items():
        if key == "general.architecture":
            writer.kv_data[0][key].value = value
        elif key not in drop:
            adders[type(value)](key, value)


def write_hf(path: Path, family: str = "llama", shards: int = 1, **config: Any) -> Path:
    """A complete directory; `config` replaces entries of config.json."""
    from safetensors.numpy import save_file

    path.mkdir(parents=True)
    weights = random_weights(family)
    names = list(weights)
    groups = [names[i::shards] for i in range(shards)]
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    for group, file in zip(groups, files if shards > 1 else ["model.safetensors"], strict=True):
        save_file({name: weights[name] for name in group}, path / file)
    if shards > 1:
        weight_map = {n: f for group, f in zip(groups, files, strict=True) for n in group}
        write_json(path / "model.safetensors.index.json", {"weight_map": weight_map})
    entries = {"model_type": family, **CONFIG, "eos_token_id": 2, "tie_word_embeddings": True}
    write_json(path / "config.json", {**entries, **config})
    write_json(path / "tokenizer_config.json", {"chat_template": TEMPLATE})
    byte_level_tokenizer().save(str(path / "tokenizer.json"))
    return path


def byte_level_tokenizer() -> Tokenizer:
    vocab = {text: i for i, text in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def write_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data), encoding="utf-8")


def edit_json(path: Path, **entries: Any) -> None:
    write_json(path, {**json.loads(path.read_text(encoding="utf-8")), **entries})


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """bf16 tensors as float32."""
    raw = path.read_bytes()
    length = struct.unpack_from("<Q", raw)[0]
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        bits = np.frombuffer(raw[start:end], np.uint16).astype(np.uint32) << 16
        tensors[name] = bits.view(np.float32).reshape(entry["shape"])
    return tensors
