"""Matrix products with constant weights.

A `LinearWeight` is prepared once and then only multiplied with. On a CPU that
multiplies bfloat16 natively it is kept in the blocked layout of oneDNN, which reads weights
about twice as fast as the plain layout at decode sizes; everything else stays plain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_PACK_ROWS = 64
"""Rows of the input that the blocked layout is made for; it serves any number of them."""
_NARROW = 768
_NARROW_ROWS = 192
_ALL_ROWS = 1 << 30
"""oneDNN multiplies many rows with a narrow weight at half its speed; in parts it does not."""


def can_pack(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class LinearWeight:
    """A constant (out_features, in_features) matrix with an optional bias."""

    __slots__ = ("_max_rows", "_multiply", "_weight", "bias", "shape")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.shape = tuple(weight.shape)
        self.bias = bias
        self._multiply = None
        self._max_rows = _NARROW_ROWS if weight.shape[0] < _NARROW else _ALL_ROWS
        if can_pack(weight):
            # The overload itself: resolving it costs as much as a small product.
            self._multiply = torch.ops.mkldnn._linear_pointwise.default
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """(n, in_features) → (n, out_features)."""
        if self._multiply is None:
            return F.linear(x, self._weight, self.bias)
        if x.shape[0] <= self._max_rows:
            return self._multiply(x, self._weight, self.bias, "none", [], "")
        parts = x.split(_even_part(x.shape[0], self._max_rows))
        return torch.cat(
            [self._multiply(p, self._weight, self.bias, "none", [], "") for p in parts]
        )


def _even_part(rows: int, most: int) -> int:
    """Size of the parts when `rows` are cut into the fewest parts of at most `most`."""
    return -(-rows // -(-rows // most))
