"""The feed-forward part of a layer."""

from torch import Tensor

from baton.engine.model_config import ModelConfig
from baton.engine.models.checkpoint_names import TensorSource
from baton.engine.models.weights import fused_linear
from baton.engine.ops.activation import GATED, PLAIN


class MLP:
    """Gated (gate and up fused) or plain (up alone), of `size` inner values."""

    def __init__(self, config: ModelConfig, prefix: str, source: TensorSource, size: int) -> None:
        hidden, bias = config.hidden_size, config.mlp_bias
        gate = (("gate_proj", size),) if config.gated_mlp else ()
        self.gate_up = fused_linear(source, prefix, (*gate, ("up_proj", size)), hidden, bias)
        self.down = fused_linear(source, prefix, (("down_proj", hidden),), size, bias)
        self.activation = (GATED if config.gated_mlp else PLAIN)[config.activation]

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate_up(x)))
