"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

What is cached per token is one normed latent for all heads and one rotated key part, in a
single plane of the cache. Checkpoints rotate neighbouring values; the rows that make them are
reordered here, once, so that the halves are rotated as everywhere else.
"""

import torch
from torch import Tensor

from baton.engine.layers.norm import RMSNorm
from baton.engine.model_config import ModelConfig
from baton.engine.models.checkpoint_names import TensorSource
from baton.engine.models.weights import fused_linear, norm_weight
from baton.engine.ops.attention import AttentionBatch, Batch, write_kv
from baton.engine.ops.latent_attention import Unpacking, latent_attention
from baton.engine.ops.linear import linear
from baton.engine.ops.rope import apply_rope_

_LATENT_EPS = 1e-6
"""Of the norms of the latents; the family fixes it whatever rms_norm_eps says."""


class LatentAttention:
    def __init__(self, config: ModelConfig, layer: int, source: TensorSource) -> None:
        assert config.latent is not None and config.attention_scale is not None
        self.sizes = m = config.latent
        self.num_heads, self.window = config.num_heads, config.windows[layer]
        prefix, hidden = f"model.layers.{layer}.self_attn", config.hidden_size
        self.query = _Query(config, prefix, source)
        down = source(f"{prefix}.kv_a_proj_with_mqa.weight", (m.kv_rank + m.rope_dim, hidden))
        name = f"{prefix}.kv_a_proj_with_mqa.bias"
        bias = source(name, (m.kv_rank + m.rope_dim,)) if config.qkv_bias else None
        self.down = linear(
            _halves(down, m.kv_rank), None if bias is None else _halves(bias, m.kv_rank)
        )
        name = f"{prefix}.kv_a_layernorm"
        self.norm = RMSNorm(norm_weight(config, source, name, (m.kv_rank,)), _LATENT_EPS)
        rows = self.num_heads * (m.nope_dim + m.value_dim)
        up = source(f"{prefix}.kv_b_proj.weight", (rows, m.kv_rank))
        keys, values = up.view(self.num_heads, -1, m.kv_rank).split([m.nope_dim, m.value_dim], 1)
        self.unpacking = Unpacking(keys.contiguous(), values.contiguous(), config.attention_scale)
        width = self.num_heads * m.value_dim
        self.out = fused_linear(source, prefix, (("o_proj", hidden),), width, config.o_bias)

    def __call__(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        cache: tuple[Tensor, Tensor],
        batch: Batch,
    ) -> Tensor:
        """(n, heads * value_dim), before the output product."""
        assert isinstance(batch, AttentionBatch), "no kernel reads latents in place"
        assert rope is not None, "the family has no learned positions"
        n, rank = x.shape[0], self.sizes.kv_rank
        q = self.query(x).view(n, self.num_heads, -1)
        apply_rope_(q[..., self.sizes.nope_dim :], *rope)
        latent = self.down(x).unsqueeze(1)
        latent[..., :rank] = self.norm(latent[..., :rank])
        apply_rope_(latent[..., rank:], *rope)
        slots, table = cache
        write_kv(latent.unsqueeze(1), slots, batch.slot_mapping)
        out = latent_attention(q, latent[:, 0], table, batch, self.window, self.unpacking)
        return out.reshape(n, -1)


class _Query:
    """One product, or two with a latent of its own between them."""

    def __init__(self, config: ModelConfig, prefix: str, source: TensorSource) -> None:
        assert config.latent is not None
        m, hidden = config.latent, config.hidden_size
        rows = config.num_heads * (m.nope_dim + m.rope_dim)
        name, columns = ("q_proj", hidden) if m.q_rank is None else ("q_b_proj", m.q_rank)
        weight = source(f"{prefix}.{name}.weight", (rows, columns))
        heads = weight.view(config.num_heads, -1, columns)
        self.up = linear(
            torch.stack([_halves(head, m.nope_dim) for head in heads]).view(rows, columns)
        )
        self.down, self.norm = None, None
        if m.q_rank is not None:
            parts = (("q_a_proj", m.q_rank),)
            self.down = fused_linear(source, prefix, parts, hidden, config.qkv_bias)
            name = f"{prefix}.q_a_layernorm"
            self.norm = RMSNorm(norm_weight(config, source, name, (m.q_rank,)), _LATENT_EPS)

    def __call__(self, x: Tensor) -> Tensor:
        if self.down is None or self.norm is None:
            return self.up(x)
        return self.up(self.norm(self.down(x)))


def _halves(rows: Tensor, start: int) -> Tensor:
    """Rows from `start` on, pairs of a rotation → first values of the pairs, second values."""
    pairs = rows[start:]
    return torch.cat((rows[:start], pairs[0::2], pairs[1::2]))
