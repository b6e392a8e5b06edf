"""Activations of the MLP, gated or not."""

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """(n, 2 * size), gate first → silu(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in its tanh form, which GPT-2 calls `gelu_new`."""
    return F.gelu(x, approximate="tanh")


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """(n, 2 * size), gate first → gelu(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu_tanh(gate).mul_(up)


GATED: Mapping[str, Activation] = {
    "silu": silu_and_mul,
    "gelu_tanh": gelu_tanh_and_mul,
}
PLAIN: Mapping[str, Activation] = {"silu": F.silu, "gelu_tanh": gelu_tanh}
