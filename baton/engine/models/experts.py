"""Mixture of experts (Mixtral, DeepSeek-V2): each token goes through its best few MLPs.

Shazeer et al., "Outrageously Large Neural Networks" (2017); the shared experts and groups of
DeepSeekMoE (2024). A token's result adds up in float32 in order of the experts' numbers, so it
does not depend on which other tokens are in the batch.
"""

import torch
from torch import Tensor

from baton.engine.model_config import ModelConfig
from baton.engine.model_parts import ExpertsConfig
from baton.engine.models.checkpoint_names import TensorSource
from baton.engine.models.mlp import MLP
from baton.engine.ops.linear import linear


class ExpertsMLP:
    def __init__(self, config: ModelConfig, prefix: str, source: TensorSource) -> None:
        assert config.experts is not None
        self.config = experts = config.experts
        # Its few rows decide which weights are used at all: never rounded.
        shape = (experts.num_experts, config.hidden_size)
        self.router = linear(source(f"{prefix}.gate.weight", shape).float())
        self.experts = [
            MLP(config, f"{prefix}.experts.{i}", source, experts.intermediate_size)
            for i in range(experts.num_experts)
        ]
        size = experts.num_shared * experts.intermediate_size
        self.shared = MLP(config, f"{prefix}.shared_experts", source, size) if size else None

    def __call__(self, x: Tensor) -> Tensor:
        """(n, hidden) → float32 (n, hidden)."""
        weights, chosen = route(self.router(x.float()), self.config)
        result = torch.zeros(x.shape, dtype=torch.float32)
        for index in chosen.unique().tolist():
            tokens, rank = torch.where(chosen == index)
            answer = self.experts[index](x[tokens]).float()
            result.index_add_(0, tokens, answer * weights[tokens, rank].unsqueeze(1))
        return result if self.shared is None else result.add_(self.shared(x))

    def add_to_(self, total: Tensor, x: Tensor) -> Tensor:
        """Adds the result to float32 (n, hidden), in place."""
        return total.add_(self(x))


def route(logits: Tensor, config: ExpertsConfig) -> tuple[Tensor, Tensor]:
    """Weights and numbers (n, top_k) of the experts that each token goes to."""
    scores = logits.softmax(dim=-1)
    if config.num_groups is not None and config.top_groups is not None:
        scores = _best_groups(scores, config.num_groups, config.top_groups)
    weights, chosen = scores.topk(config.top_k, dim=-1)
    if config.renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights * config.scale, chosen


def _best_groups(scores: Tensor, num_groups: int, top_groups: int) -> Tensor:
    """Scores outside a token's best groups, judged by their best expert, are zero."""
    grouped = scores.view(len(scores), num_groups, -1)
    best = grouped.amax(dim=-1).topk(top_groups, dim=-1).indices
    kept = torch.zeros(grouped.shape[:2]).scatter_(1, best, 1.0)
    return (grouped * kept.unsqueeze(-1)).flatten(1)
