"""Matrix products with constant weights.

A weight is prepared once (`LinearWeight.of`) and then only multiplied with. On a CPU that
multiplies bfloat16 natively it is kept in the blocked layout of oneDNN, which reads weights
about twice as fast as the plain layout at decode sizes; everything else stays plain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_PACK_ROWS = 64
"""Rows of the input that the blocked layout is made for; it serves any number of them."""


def can_pack(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class LinearWeight:
    """A constant (out_features, in_features) matrix with an optional bias."""

    __slots__ = ("_packed", "_weight", "bias", "shape")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.shape = tuple(weight.shape)
        self.bias = bias
        self._packed = can_pack(weight)
        if self._packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """(n, in_features) → (n, out_features)."""
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise.default(
                x, self._weight, self.bias, "none", [], ""
            )
        return F.linear(x, self._weight, self.bias)
