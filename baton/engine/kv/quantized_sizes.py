"""How many bytes a quantized block takes, and where they go. No torch."""

from dataclasses import dataclass

KINDS = {"fp8": 8, "int8": 8, "int4": 4}
"""Bits of a value."""
_ALIGN = 8


@dataclass(frozen=True)
class QuantizedSizes:
    """Of one block in one layer."""

    kind: str
    block_size: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"KV kind must be one of {', '.join(KINDS)}, not {self.kind!r}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even for a quantized cache")

    @property
    def parts(self) -> tuple[int, ...]:
        """Bytes of key scales, value scales, key zero points, value zero points, keys, values."""
        heads, channels = self.num_kv_heads, self.num_kv_heads * self.head_dim
        tokens = self.block_size * heads
        payload = tokens * self.head_dim * KINDS[self.kind] // 8
        if self.kind == "fp8":  # a channel's zero point is its mean
            return 2 * heads, 2 * tokens, 2 * channels, 0, payload, payload
        zero = 1 if self.kind == "int4" else 0
        return 2 * channels, 2 * tokens, zero * channels, zero * tokens, payload, payload

    @property
    def row_bytes(self) -> int:
        """All parts, padded so that rows of any number can be read as numbers of 8 bytes."""
        return -(-sum(self.parts) // _ALIGN) * _ALIGN
