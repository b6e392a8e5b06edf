"""The decoder-only transformer of every supported family; the differences are in ModelConfig.

Works on a flat batch of tokens and knows nothing of sequences: which tokens belong together is
in the batch that attention takes. Weights come from a `TensorSource`, are fused (query, key and
value; gate and up) and never change afterwards.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.kv_cache import KVCache
from baton.engine.layers.rotary import RotaryEmbedding
from baton.engine.model_config import ModelConfig
from baton.engine.models.checkpoint_names import TensorSource
from baton.engine.models.experts import ExpertsMLP
from baton.engine.models.latent import LatentAttention
from baton.engine.models.mlp import MLP
from baton.engine.models.weights import fused_linear, norm, norm_weight
from baton.engine.ops.attention import (
    Batch,
    PagedBatch,
    paged_attention,
    reads_in_place,
    write_kv,
)
from baton.engine.ops.logits import LogitsHead
from baton.engine.ops.norm import rms_norm
from baton.engine.ops.quantized_attention import quantized_attention
from baton.engine.ops.quantized_in_place import quantized_in_place
from baton.engine.ops.rope import Rope, apply_rope_, rotate_and_store
from baton.engine.ops.sinks import Anchors


class Attention:
    def __init__(self, config: ModelConfig, layer: int, source: TensorSource) -> None:
        prefix = f"model.layers.{layer}.self_attn"
        hidden, q_size, kv_size = config.hidden_size, config.q_size, config.kv_size
        parts = (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size))
        self.qkv = fused_linear(source, prefix, parts, hidden, config.qkv_bias)
        self.out = fused_linear(source, prefix, (("o_proj", hidden),), q_size, config.o_bias)
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        self.layer, self.window = layer, config.windows[layer]
        self.rotary_dim = config.rotary_dim
        self.rotates_whole_heads = config.rotary_dim == config.head_dim
        self.scale, self.softcap = config.attention_scale, config.attention_softcap
        self.qk_norm = _head_norms(config, prefix, source) if config.qk_norm else None

    def __call__(
        self, x: Tensor, rope: Rope | None, cache: tuple[Tensor, Tensor], batch: Batch
    ) -> Tensor:
        n = x.shape[0]
        qkv = self.qkv(x).view(n, -1, self.head_dim)
        kv = qkv[:, self.num_heads :].view(n, 2, self.num_kv_heads, self.head_dim)
        q = qkv[:, : self.num_heads]
        anchored = None if batch.anchors is None else self._anchored(q, batch.anchors)
        if isinstance(batch, PagedBatch) and rope is not None and self.rotates_whole_heads:
            slots = None if batch.quantized else cache[0]
            norm, slot_mapping = self.qk_norm, batch.slot_mapping
            rotate_and_store(qkv, rope, norm, self.eps, slots, slot_mapping, self.num_heads)
            out = self._read(q, kv, cache, batch, anchored)
        else:
            out = self._attend(qkv, rope, kv, cache, batch, anchored)
        if batch.retention is not None:
            batch.retention.after(self.layer, q, cache, self.scale, self.softcap)
        return out.reshape(n, -1)

    def _attend(
        self,
        qkv: Tensor,
        rope: Rope | None,
        kv: Tensor,
        cache: tuple[Tensor, Tensor],
        batch: Batch,
        anchored: Tensor | None,
    ) -> Tensor:
        self._rotate(qkv, rope)
        if batch.quantized is None:
            write_kv(kv, cache[0], batch.slot_mapping)
        return self._read(qkv[:, : self.num_heads], kv, cache, batch, anchored)

    def _read(
        self,
        q: Tensor,
        kv: Tensor,
        cache: tuple[Tensor, Tensor],
        batch: Batch,
        anchored: Tensor | None,
    ) -> Tensor:
        """Attention; a quantized cache is written by it."""
        how = (self.window, self.scale, self.softcap, anchored)
        if batch.quantized is None:
            return paged_attention(q, kv, cache, batch, *how)
        if isinstance(batch, PagedBatch):
            return quantized_in_place(q, kv, cache[1], batch, self.window, self.scale, anchored)
        return quantized_attention(q, kv, cache[1], batch.quantized, *how)

    def _anchored(self, q: Tensor, anchors: Anchors) -> Tensor:
        """The queries (n, head, head_dim) as sinks meet them."""
        rope = anchors.ropes[self.window is not None] if anchors.ropes else None
        assert rope is not None, "only rotary positions can be anchored"
        heads = q.to(rope[0].dtype, copy=True)
        if self.qk_norm is not None:
            heads = rms_norm(heads, self.qk_norm[: self.num_heads], self.eps)
        apply_rope_(heads[..., : self.rotary_dim], *rope)
        return heads.to(q.dtype)

    def _rotate(self, qkv: Tensor, rope: Rope | None) -> None:
        heads = qkv[:, : self.num_heads + self.num_kv_heads]
        if self.qk_norm is not None:
            heads.copy_(rms_norm(heads, self.qk_norm, self.eps))
        if rope is not None:
            apply_rope_(heads[..., : self.rotary_dim], *rope)


class DecoderLayer:
    def __init__(
        self, config: ModelConfig, layer: int, source: TensorSource, dtype: torch.dtype
    ) -> None:
        prefix = f"model.layers.{layer}"
        self.dtype = dtype
        self.input_norm = norm(config, source, f"{prefix}.input_layernorm")
        self.attention = (Attention if config.latent is None else LatentAttention)(
            config, layer, source
        )
        self.attention_out_norm = self.mlp_out_norm = None
        mlp_norm = "post_attention_layernorm"
        if config.sandwich_norms:
            mlp_norm = "pre_feedforward_layernorm"
            self.attention_out_norm = norm(config, source, f"{prefix}.post_attention_layernorm")
            self.mlp_out_norm = norm(config, source, f"{prefix}.post_feedforward_layernorm")
        self.mlp_norm = norm(config, source, f"{prefix}.{mlp_norm}")
        self.mlp: MLP | ExpertsMLP
        if config.has_experts(layer):
            self.mlp = ExpertsMLP(config, f"{prefix}.mlp", source)
        else:
            self.mlp = MLP(config, f"{prefix}.mlp", source, config.intermediate_size)

    def __call__(
        self,
        x: Tensor,
        rope: Rope | None,
        cache: tuple[Tensor, Tensor],
        batch: Batch,
        rows: Tensor | None,
    ) -> Tensor:
        """Adds this layer to the float32 residual stream `x`. With `rows`, only those go on."""
        attended = self.attention(self.input_norm(x, self.dtype), rope, cache, batch)
        if rows is not None:
            x, attended = x.index_select(0, rows), attended.index_select(0, rows)
            if not rows.shape[0]:
                return x
        if self.attention_out_norm is None:
            self.attention.out.add_to_(x, attended)
        else:
            x.add_(self.attention_out_norm(self.attention.out(attended), torch.float32))
        normed = self.mlp_norm(x, self.dtype)
        if self.mlp_out_norm is None:
            return self.mlp.add_to_(x, normed)
        return x.add_(self.mlp_out_norm(self.mlp(normed), torch.float32))


class DecoderModel:
    def __init__(self, config: ModelConfig, source: TensorSource) -> None:
        vocab = (config.vocab_size, config.hidden_size)
        self.config = config
        embedding = source("model.embed_tokens.weight", vocab)
        self.dtype = embedding.dtype
        self.embedding_scale = float(torch.tensor(config.embedding_scale, dtype=self.dtype))
        self.positions = self.rotary = None
        if config.rope is None:
            rows = (config.max_position_embeddings, config.hidden_size)
            self.positions = source("model.embed_positions.weight", rows)
        else:
            self.rotary = RotaryEmbedding(config.rope, config.rotary_dim)
        self.window_rotary = self.rotary
        if config.window_rope is not None:
            self.window_rotary = RotaryEmbedding(config.window_rope, config.rotary_dim)
        self.layers = [
            DecoderLayer(config, i, source, self.dtype) for i in range(config.num_layers)
        ]
        self.final_norm = norm(config, source, "model.norm")
        tied = config.tie_word_embeddings
        self.head = LogitsHead(embedding if tied else source("lm_head.weight", vocab))
        self.embed = self.head.rows if tied else partial(F.embedding, weight=embedding)
        self.reads_in_place = config.latent is None and reads_in_place(
            self.dtype, config.head_dim, config.attention_softcap
        )
        """Whether `forward` takes a PagedBatch, else an AttentionBatch."""

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        cache: KVCache,
        batch: Batch,
        rows: Tensor | None = None,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """float32 hidden states (n or len(rows), hidden) of flat token ids; writes their KV.

        The residual stream is float32 whatever the model's dtype: sums over many layers in
        bfloat16 would move near-ties. `rows`, in the order wanted, are the tokens whose result
        is needed: the last layer does no other. `on_layer` hears how many layers have written
        the KV of all tokens."""
        x = self._embed(token_ids, positions)
        wide = isinstance(batch, PagedBatch)
        ropes = self._ropes(positions, wide)
        if (anchors := batch.anchors) is not None:
            anchored = self._ropes(anchors.positions, wide)
            batch = replace(batch, anchors=Anchors(anchors.positions, anchored))
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            place = (cache.slots[index], cache.tables[index])
            rope = ropes[self.config.windows[index] is not None]
            x = layer(x, rope, place, batch, rows if index == last else None)
            if on_layer is not None:
                on_layer(index + 1)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits (n, vocab) of hidden states."""
        logits = self.head(self.final_norm(hidden))
        cap = self.config.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(token_ids).float()
        if self.embedding_scale != 1.0:
            x.mul_(self.embedding_scale)
        return x if self.positions is None else x.add_(F.embedding(positions, self.positions))

    def _ropes(self, positions: Tensor, wide: bool) -> tuple[Rope | None, Rope | None]:
        """For layers that see everything, and for those with a window; kernels want float32."""
        if self.rotary is None or self.window_rotary is None:
            return None, None
        dtype = (
            torch.float32 if wide and self.config.rotary_dim == self.config.head_dim else self.dtype
        )
        rope = self.rotary(positions, dtype)
        if self.window_rotary is self.rotary:
            return rope, rope
        return rope, self.window_rotary(positions, dtype)


def _head_norms(config: ModelConfig, prefix: str, source: TensorSource) -> Tensor:
    """(query heads then key heads, head_dim) weights, so that one product scales them all."""
    shape = (config.head_dim,)
    query = norm_weight(config, source, f"{prefix}.q_norm", shape).expand(config.num_heads, -1)
    key = norm_weight(config, source, f"{prefix}.k_norm", shape).expand(config.num_kv_heads, -1)
    return torch.cat((query, key))
