"""Where each weight is in a family's checkpoint: its name there, its rows of a fused tensor.

The decoder asks for weights by one set of names, Llama's, and DeepSeek's for experts and
latents. A `Place` says where such a weight is; families that are not listed use those names.
"""

import re
from collections.abc import Callable, Collection
from typing import NamedTuple

from torch import Tensor

from baton.engine.model_config import ModelConfig

TensorSource = Callable[[str, tuple[int, ...]], Tensor]
"""Gives the tensor of a checkpoint name in the model's dtype, or raises if the shape differs."""


class Place(NamedTuple):
    """Rows [start, start + wanted) of the `total` of a tensor; 0 is a tensor for itself.
    `transposed`: stored as (in_features, out_features)."""

    name: str
    start: int = 0
    total: int = 0
    transposed: bool = False


def source_for(config: ModelConfig, names: Collection[str], read: TensorSource) -> TensorSource:
    """Answers to the decoder's names from a checkpoint that holds `names`."""
    locate = _FAMILIES.get(config.family)
    if locate is None:
        return read
    prefix = "transformer." if "transformer.wte.weight" in names else ""

    def source(name: str, shape: tuple[int, ...]) -> Tensor:
        place = locate(config, name)
        rows, *rest = shape
        stored = (place.total or rows, *rest)
        stored_name = place.name if name == "lm_head.weight" else prefix + place.name
        tensor = read(stored_name, stored[::-1] if place.transposed else stored)
        tensor = tensor.T if place.transposed else tensor
        return tensor[place.start : place.start + rows].contiguous()

    return source


def unused_by(config: ModelConfig, name: str) -> bool:
    """Whether a tensor is known to be in checkpoints without being a weight."""
    if config.family == "gpt2":
        return re.search(r"\.attn\.(masked_)?bias$", name) is not None
    return name.endswith("rotary_emb.inv_freq")


_GPT2_NAMES = {
    "model.embed_tokens": "wte",
    "model.embed_positions": "wpe",
    "model.norm": "ln_f",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}


def _gpt2(config: ModelConfig, name: str) -> Place:
    layer, stem, kind = _parts(name)
    prefix = "" if layer is None else f"h.{layer}."
    transposed = kind == "weight" and stem.endswith("_proj")
    if stem in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        rows = config.hidden_size
        start = rows * "qkv".index(stem.removeprefix("self_attn.")[0])
        return Place(f"{prefix}attn.c_attn.{kind}", start, 3 * rows, transposed)
    return Place(f"{prefix}{_GPT2_NAMES.get(stem, stem)}.{kind}", transposed=transposed)


def _phi3(config: ModelConfig, name: str) -> Place:
    _, stem, _ = _parts(name)
    q, kv, mlp = config.q_size, config.kv_size, config.intermediate_size
    fused = {
        "self_attn.q_proj": ("qkv_proj", 0, q + 2 * kv),
        "self_attn.k_proj": ("qkv_proj", q, q + 2 * kv),
        "self_attn.v_proj": ("qkv_proj", q + kv, q + 2 * kv),
        "mlp.gate_proj": ("gate_up_proj", 0, 2 * mlp),
        "mlp.up_proj": ("gate_up_proj", mlp, 2 * mlp),
    }
    if stem not in fused:
        return Place(name)
    stored, start, total = fused[stem]
    return Place(name.replace(stem.split(".")[1], stored), start, total)


_MIXTRAL_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def _mixtral(config: ModelConfig, name: str) -> Place:
    for ours, theirs in _MIXTRAL_NAMES.items():
        name = name.replace(f".{ours}.", f".{theirs}.")
    return Place(name.replace(".mlp.", ".block_sparse_moe."))


_FAMILIES: dict[str, Callable[[ModelConfig, str], Place]] = {
    "gpt2": _gpt2,
    "phi3": _phi3,
    "mixtral": _mixtral,
}


def _parts(name: str) -> tuple[str | None, str, str]:
    """Layer number, what it is, and "weight" or "bias"."""
    stem, _, kind = name.rpartition(".")
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    return (match[1], match[2], kind) if match else (None, stem, kind)
