"""The feed-forward part of a layer."""

from torch import Tensor

from baton.engine.model_config import ModelConfig
from baton.engine.models.checkpoint_names import TensorSource
from baton.engine.models.weights import activated, fused_gate_up, fused_linear
from baton.engine.ops.activation import GATED, PLAIN, Activation


class MLP:
    """Gated (gate and up fused) or plain (up alone), of `size` inner values."""

    def __init__(self, config: ModelConfig, prefix: str, source: TensorSource, size: int) -> None:
        hidden, bias = config.hidden_size, config.mlp_bias
        self._inner: Activation
        if config.gated_mlp:
            activate = GATED[config.activation]
            self._inner = fused_gate_up(source, prefix, size, hidden, bias, activate)
        else:
            name, activate = f"{prefix}.up_proj", PLAIN[config.activation]
            self._inner = activated(source, name, (size, hidden), bias, activate)
        self._down = fused_linear(source, prefix, (("down_proj", hidden),), size, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._inner(x))

    def add_to_(self, total: Tensor, x: Tensor) -> Tensor:
        """Adds the result to float32 (n, hidden), in place."""
        return self._down.add_to_(total, self._inner(x))
