"""Matrix products with constant weights.

A product is prepared once and then only multiplied with. On a CPU it is packed for our own kernels
where the machine runs them; else bfloat16 takes the blocked layout of oneDNN, which reads weights
about twice as fast as the plain layout at decode sizes. Everything else stays plain.
"""

from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.ops.activation import Activation, gelu_tanh, gelu_tanh_and_mul, silu_and_mul
from baton.engine.ops.cpu.kernels import Finish, Kernels, kernels, takes_linear

_PACK_ROWS = 64
"""Rows of the input that the blocked layout is made for; it serves any number of them."""
_NARROW = 768
_NARROW_ROWS = 192
_ALL_ROWS = 1 << 30
"""oneDNN multiplies many rows with a narrow weight at half its speed; in parts it does not."""
GATES: dict[Activation, Finish] = {
    silu_and_mul: Finish.SILU_AND_MUL,
    gelu_tanh_and_mul: Finish.GELU_AND_MUL,
}
ACTIVATIONS: dict[Activation, Finish] = {F.silu: Finish.SILU, gelu_tanh: Finish.GELU}
"""What a kernel computes while it has the sums at hand. torch's own go over vectors and then over
what is left, which rounds otherwise: where a number stands in its batch would be seen."""


class Linear(Protocol):
    """Multiplication with a constant (out_features, in_features) matrix, plus a bias."""

    def __call__(self, x: Tensor) -> Tensor:
        """(n, in_features) → (n, out_features) of the same dtype."""

    def add_to_(self, total: Tensor, x: Tensor) -> Tensor:
        """Adds the product to float32 (n, out_features), in place."""


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    loaded = kernels()
    if loaded is not None and takes_linear(weight):
        return KernelLinear(loaded, weight, bias)
    return TorchLinear(weight, bias)


def activated_linear(weight: Tensor, bias: Tensor | None, activate: Activation) -> Activation:
    """The product and then `activate`, number by number."""
    product, finish = linear(weight, bias), ACTIVATIONS.get(activate)
    if finish is not None and isinstance(product, KernelLinear):
        return partial(product.finished, how=finish)
    return lambda x: activate(product(x))


def gated_linear(weight: Tensor, bias: Tensor | None, activate: Activation) -> Activation:
    """The product with a (2 * size, in_features) matrix, gate rows first, and then `activate`."""
    loaded = kernels()
    size = weight.shape[0] // 2
    gate = GATES.get(activate)
    if gate is not None and loaded is not None and takes_linear(weight) and size % 16 == 0:
        return KernelGated(loaded, weight, bias, gate)
    product = linear(weight, bias)
    return lambda x: activate(product(x))


class TorchLinear:
    __slots__ = ("_bias", "_max_rows", "_multiply", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._multiply = None
        self._max_rows = _NARROW_ROWS if weight.shape[0] < _NARROW else _ALL_ROWS
        if _can_block(weight):
            # The overload itself: resolving it costs as much as a small product.
            self._multiply = torch.ops.mkldnn._linear_pointwise.default
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        if self._multiply is None:
            return F.linear(x, self._weight, self._bias)
        if x.shape[0] <= self._max_rows:
            return self._multiply(x, self._weight, self._bias, "none", [], "")
        parts = x.split(_even_part(x.shape[0], self._max_rows))
        return torch.cat(
            [self._multiply(p, self._weight, self._bias, "none", [], "") for p in parts]
        )

    def add_to_(self, total: Tensor, x: Tensor) -> Tensor:
        return total.add_(self(x))


class KernelLinear:
    __slots__ = ("_bias", "_depth", "_kernels", "_outputs", "_packed")

    def __init__(self, loaded: Kernels, weight: Tensor, bias: Tensor | None = None) -> None:
        self._kernels = loaded
        self._outputs, self._depth = weight.shape
        self._packed = loaded.pack(weight)
        self._bias = None if bias is None else _padded(bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.finished(x, Finish.STORE)

    def finished(self, x: Tensor, how: Finish) -> Tensor:
        return self._product(x, self._packed.dtype, how)

    def unrounded(self, x: Tensor) -> Tensor:
        """The product in float32, as it was summed up."""
        return self._product(x, torch.float32, Finish.FLOAT32)

    def rows(self, indices: Tensor) -> Tensor:
        """(n, in_features) rows of the matrix; see src/tiles.h for where they are."""
        words = 4 // self._packed.itemsize
        tiles = self._packed.view(-1, -(-self._depth // 32), 2, 32 // words, 16, words)
        picked = tiles[indices // 32, :, indices % 32 // 16, :, indices % 16]
        return picked.flatten(1)[:, : self._depth].contiguous()

    def add_to_(self, total: Tensor, x: Tensor) -> Tensor:
        self._kernels.linear(x, self._packed, self._bias, self._outputs, total, Finish.ADD)
        return total

    def _product(self, x: Tensor, dtype: torch.dtype, how: Finish) -> Tensor:
        out = torch.empty(x.shape[0], self._outputs, dtype=dtype)
        self._kernels.linear(x, self._packed, self._bias, self._outputs, out, how)
        return out


class KernelGated:
    """activate(gate) * up without storing either: 16 rows of one stand beside 16 of the other."""

    __slots__ = ("_bias", "_gate", "_kernels", "_outputs", "_packed")

    def __init__(self, loaded: Kernels, weight: Tensor, bias: Tensor | None, gate: Finish) -> None:
        self._kernels, self._gate = loaded, gate
        self._outputs = weight.shape[0]
        self._packed = loaded.pack(_beside(weight))
        self._bias = None if bias is None else _padded(_beside(bias))

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], self._outputs // 2, dtype=self._packed.dtype)
        self._kernels.linear(x, self._packed, self._bias, self._outputs, out, self._gate)
        return out


def _beside(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2)
    return torch.stack((gate.unflatten(0, (-1, 16)), up.unflatten(0, (-1, 16))), 1).flatten(0, 2)


def _padded(bias: Tensor) -> Tensor:
    return F.pad(bias.float(), (0, -len(bias) % 32))


def _can_block(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def _even_part(rows: int, most: int) -> int:
    """Size of the parts when `rows` are cut into the fewest parts of at most `most`."""
    return -(-rows // -(-rows // most))
