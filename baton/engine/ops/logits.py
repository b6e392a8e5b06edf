"""Logits near the top, to more digits than a bfloat16 product returns.

A bfloat16 result carries 8 bits: at a logit of 20 its steps are 1/8, and the two best tokens
often tie. The few within a step or two of the best are computed again in float32.
"""

import torch
from torch import Tensor

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
