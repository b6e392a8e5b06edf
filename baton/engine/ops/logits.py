"""Logits to more digits than a bfloat16 result has.

A bfloat16 number carries 8 bits: at a logit of 20 its steps are 1/8, and the two best tokens
often tie. Our own kernels sum up in float32 and do not round. Where torch rounds, the few logits
within a step or two of the best are computed again in float32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.ops.linear import KernelLinear, linear


class LogitsHead:
    """The last product, with `rows` (vocab, size)."""

    def __init__(self, rows: Tensor) -> None:
        self._dtype, self._product = rows.dtype, linear(rows)
        # Packed, they are in memory once.
        self._rows = None if isinstance(self._product, KernelLinear) else rows

    def rows(self, indices: Tensor) -> Tensor:
        """(n, size), as a table of embeddings that is tied to the product."""
        if isinstance(self._product, KernelLinear):
            return self._product.rows(indices)
        assert self._rows is not None
        return F.embedding(indices, self._rows)

    def __call__(self, hidden: Tensor) -> Tensor:
        """float32 hidden states (n, size) → float32 (n, vocab)."""
        rounded = hidden.to(self._dtype)
        if isinstance(self._product, KernelLinear):
            return self._product.unrounded(rounded)
        logits = self._product(rounded).float()
        if self._rows is not None and self._dtype is not torch.float32:
            sharpen_(logits, hidden, self._rows)
        return logits


_MARGIN = 2.0**-6
"""Of the largest magnitude: two steps of bfloat16 on either side."""
_MOST = 64
"""Candidates per row, on average; a flatter distribution has no best token to tell apart."""


def sharpen_(logits: Tensor, hidden: Tensor, weight: Tensor) -> None:
    """In place. `logits`: float32 (n, vocab), rounded; `hidden`: float32 (n, size); `weight`:
    (vocab, size)."""
    best = logits.amax(dim=-1, keepdim=True)
    rows, ids = torch.nonzero(logits >= best - best.abs() * _MARGIN, as_tuple=True)
    if len(rows) > _MOST * len(logits):
        return
    logits[rows, ids] = (hidden[rows] * weight[ids].float()).sum(dim=-1)
