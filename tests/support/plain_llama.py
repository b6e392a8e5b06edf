"""A Llama of `transformers`, run token by token over a cache that the caller may cut as he likes.

What a policy means is written down here once more, without batches, chunks, blocks or kernels.
The cache of a layer is keys and values (token, kv_head, head_dim), keys as the caller stores them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import rotate_half


@dataclass
class LayerCache:
    keys: Tensor
    values: Tensor


Attend = Callable[["LayerCache", int, Tensor, Tensor, Tensor], Tensor]
"""(cache, position, q (head, dim), k (kv_head, dim), v) → (head, dim); q and k are not rotated."""


class PlainLlama:
    def __init__(self, reference: Any) -> None:
        self.model = reference
        config = reference.config
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.head_dim = config.head_dim
        empty = torch.empty(0, config.num_key_value_heads, config.head_dim)
        self.caches = [LayerCache(empty, empty) for _ in range(config.num_hidden_layers)]

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """(token, head, dim) at the positions (token)."""
        cos, sin = self.model.model.rotary_emb(x, positions.unsqueeze(0))
        return x * cos[0].unsqueeze(1) + rotate_half(x) * sin[0].unsqueeze(1)

    @torch.no_grad()
    def step(self, token: int, position: int, attend: Attend) -> Tensor:
        """Logits (vocab) after one more token."""
        x = self.model.model.embed_tokens(torch.tensor([token]))
        for layer, cache in zip(self.model.model.layers, self.caches, strict=True):
            normed, own = layer.input_layernorm(x), layer.self_attn
            q, k, v = (
                project(normed).view(-1, self.head_dim)
                for project in (own.q_proj, own.k_proj, own.v_proj)
            )
            out = attend(cache, position, q, k, v)
            x = x + own.o_proj(out.reshape(1, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.lm_head(self.model.model.norm(x))[0]

    def weights(self, q: Tensor, keys: Tensor) -> Tensor:
        """(head, token) of rotated q and keys."""
        by_head = keys.repeat_interleave(self.group, dim=1)
        return torch.einsum("hd,thd->ht", q, by_head).mul(self.head_dim**-0.5).softmax(-1)

    def mix(self, weights: Tensor, values: Tensor) -> Tensor:
        return torch.einsum("ht,thd->hd", weights, values.repeat_interleave(self.group, dim=1))

    def append(self, cache: LayerCache, k: Tensor, v: Tensor) -> None:
        cache.keys = torch.cat((cache.keys, k.unsqueeze(0)))
        cache.values = torch.cat((cache.values, v.unsqueeze(0)))


def greedy(
    plain: PlainLlama, attend: Attend, prompt: list[int], max_tokens: int
) -> tuple[list[int], list[float]]:
    """Tokens and their log probabilities."""
    tokens, found = list(prompt), []
    for position in range(len(prompt) + max_tokens - 1):
        logits = plain.step(tokens[position], position, attend)
        if position >= len(prompt) - 1:
            tokens.append(int(logits.argmax()))
            found.append(float(logits.log_softmax(-1)[tokens[-1]]))
    return tokens[len(prompt) :], found
