"""C functions that exist once per element type."""

import ctypes
from collections.abc import Callable

import torch

DTYPES = {torch.bfloat16: "bf16", torch.float32: "float"}
"""Of weights, queries and caches, and how the functions that take them end."""


def by_dtype(
    loaded: ctypes.CDLL, name: str, arguments: tuple[type, ...]
) -> dict[torch.dtype, Callable[..., None]]:
    found = {dtype: getattr(loaded, f"{name}_{suffix}") for dtype, suffix in DTYPES.items()}
    for function in found.values():
        function.argtypes, function.restype = arguments, None
    return found
