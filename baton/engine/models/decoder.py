"""The decoder-only transformer of every supported family; the differences are in ModelConfig.

Works on a flat batch of tokens and knows nothing of sequences: which tokens belong together is
in the AttentionBatch. Weights come from a `TensorSource`, are fused (query, key and value; gate
and up) and never change afterwards.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.kv_cache import KVCache
from baton.engine.layers.rotary import RotaryEmbedding
from baton.engine.model_config import ModelConfig
from baton.engine.ops.activation import silu_and_mul
from baton.engine.ops.attention import AttentionBatch, paged_attention, write_kv
from baton.engine.ops.linear import LinearWeight
from baton.engine.ops.logits import sharpen_
from baton.engine.ops.norm import rms_norm
from baton.engine.ops.rope import apply_rope_

TensorSource = Callable[[str, tuple[int, ...]], Tensor]
"""Gives the tensor of a checkpoint name in the model's dtype, or raises if the shape differs."""


class Attention:
    def __init__(self, config: ModelConfig, layer: int, source: TensorSource) -> None:
        prefix = f"model.layers.{layer}.self_attn"
        hidden, q_size, kv_size = config.hidden_size, config.q_size, config.kv_size
        parts = (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size))
        self.qkv = fused_linear(source, prefix, parts, hidden, config.qkv_bias)
        self.out = fused_linear(source, prefix, (("o_proj", hidden),), q_size, config.o_bias)
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, self.eps = config.head_dim, torch.tensor(config.rms_norm_eps)
        self.window = config.windows[layer]
        self.qk_norm = _head_norms(config, prefix, source) if config.qk_norm else None

    def __call__(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        batch: AttentionBatch,
    ) -> Tensor:
        n = x.shape[0]
        qkv = self.qkv(x).view(n, -1, self.head_dim)
        rotated = self.num_heads + self.num_kv_heads
        heads = qkv[:, :rotated]
        if self.qk_norm is not None:
            heads.copy_(rms_norm(heads, self.qk_norm, self.eps))
        apply_rope_(heads, *rope)
        kv = qkv[:, self.num_heads :].view(n, 2, self.num_kv_heads, self.head_dim)
        slots, table = cache
        write_kv(kv, slots, batch.slot_mapping)
        return paged_attention(qkv[:, : self.num_heads], kv, table, batch, self.window).view(n, -1)


class MLP:
    def __init__(self, config: ModelConfig, layer: int, source: TensorSource) -> None:
        prefix = f"model.layers.{layer}.mlp"
        hidden, size, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        parts = (("gate_proj", size), ("up_proj", size))
        self.gate_up = fused_linear(source, prefix, parts, hidden, bias)
        self.down = fused_linear(source, prefix, (("down_proj", hidden),), size, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(silu_and_mul(self.gate_up(x)))


class DecoderLayer:
    def __init__(
        self, config: ModelConfig, layer: int, source: TensorSource, dtype: torch.dtype
    ) -> None:
        prefix, hidden = f"model.layers.{layer}", (config.hidden_size,)
        self.dtype = dtype
        self.input_norm = source(f"{prefix}.input_layernorm.weight", hidden).float()
        self.post_norm = source(f"{prefix}.post_attention_layernorm.weight", hidden).float()
        self.attention = Attention(config, layer, source)
        self.mlp = MLP(config, layer, source)
        self.eps = torch.tensor(config.rms_norm_eps)

    def __call__(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        batch: AttentionBatch,
        rows: Tensor | None,
    ) -> Tensor:
        """Adds this layer to the float32 residual stream `x`. With `rows`, only those go on."""
        normed = rms_norm(x, self.input_norm, self.eps, self.dtype)
        attended = self.attention(normed, rope, cache, batch)
        if rows is not None:
            x, attended = x.index_select(0, rows), attended.index_select(0, rows)
            if not rows.shape[0]:
                return x
        x = x.add_(self.attention.out(attended))
        return x.add_(self.mlp(rms_norm(x, self.post_norm, self.eps, self.dtype)))


class DecoderModel:
    def __init__(self, config: ModelConfig, source: TensorSource) -> None:
        vocab = (config.vocab_size, config.hidden_size)
        self.config = config
        self.embedding = source("model.embed_tokens.weight", vocab)
        self.dtype = self.embedding.dtype
        self.rotary = RotaryEmbedding(config.rope, config.head_dim)
        self.layers = [
            DecoderLayer(config, i, source, self.dtype) for i in range(config.num_layers)
        ]
        self.final_norm = source("model.norm.weight", (config.hidden_size,)).float()
        self.eps = torch.tensor(config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self.head_rows = self.embedding if tied else source("lm_head.weight", vocab)
        self.head = LinearWeight(self.head_rows)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        cache: KVCache,
        batch: AttentionBatch,
        rows: Tensor | None = None,
    ) -> Tensor:
        """float32 hidden states (n or len(rows), hidden) of flat token ids; writes their KV.

        The residual stream is float32 whatever the model's dtype: sums over many layers in
        bfloat16 would move near-ties. `rows`, in the order wanted, are the tokens whose result
        is needed: the last layer does no other."""
        x = F.embedding(token_ids, self.embedding).float()
        rope = self.rotary(positions, self.dtype)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            place = (cache.slots[index], cache.tables[index])
            x = layer(x, rope, place, batch, rows if index == last else None)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits (n, vocab) of hidden states."""
        normed = rms_norm(hidden, self.final_norm, self.eps)
        logits = self.head(normed.to(self.dtype)).float()
        if self.dtype is not torch.float32:
            sharpen_(logits, normed, self.head_rows)
        return logits


def fused_linear(
    source: TensorSource,
    prefix: str,
    parts: tuple[tuple[str, int], ...],
    in_features: int,
    bias: bool,
) -> LinearWeight:
    """One weight of the parts' rows, in order."""
    weight = torch.cat(
        [source(f"{prefix}.{name}.weight", (out, in_features)) for name, out in parts]
    )
    biases = [source(f"{prefix}.{name}.bias", (out,)) for name, out in parts] if bias else None
    return LinearWeight(weight, torch.cat(biases) if biases else None)


def _head_norms(config: ModelConfig, prefix: str, source: TensorSource) -> Tensor:
    """(query heads then key heads, head_dim) weights, so that one product scales them all."""
    shape = (config.head_dim,)
    query = source(f"{prefix}.q_norm.weight", shape).expand(config.num_heads, -1)
    key = source(f"{prefix}.k_norm.weight", shape).expand(config.num_kv_heads, -1)
    return torch.cat((query, key)).float()
