"""The shape of a KV cache as both ends of a hand-off must agree on it. No torch.

Two caches can exchange blocks exactly when their layouts are equal.
"""

from dataclasses import dataclass

from baton.engine.model_config import ModelConfig

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class KVLayout:
    """`layer_kinds[layer]` is "full", "window" or "latent"; `fingerprint` names the weights. A
    latent layer caches one plane (of one head) per token, the others a key and a value plane."""

    fingerprint: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    layer_kinds: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"KV dtype must be one of {sorted(DTYPE_BYTES)}, not {self.dtype!r}")
        if len(self.layer_kinds) != self.num_layers:
            raise ValueError(
                f"layer_kinds names {len(self.layer_kinds)} of {self.num_layers} layers"
            )
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {self.block_size}")

    @staticmethod
    def of(
        config: ModelConfig, block_size: int, dtype: str = "bfloat16", fingerprint: str = ""
    ) -> "KVLayout":
        _, heads, values = config.kv_shape
        return KVLayout(
            fingerprint=fingerprint,
            num_layers=config.num_layers,
            num_kv_heads=heads,
            head_dim=values,
            block_size=block_size,
            dtype=dtype,
            layer_kinds=_kinds(config),
        )

    @property
    def num_planes(self) -> int:
        return 1 if "latent" in self.layer_kinds else 2

    @property
    def bytes_per_token(self) -> int:
        """Keys and values, or latents, of one token over all layers."""
        per_layer = self.num_planes * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]
        return self.num_layers * per_layer

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size

    def unit_shape(self, layer_count: int, block_count: int) -> tuple[int, ...]:
        """Shape of a hand-off unit: (layer, plane, block, slot, kv_head, head_dim)."""
        slot = (self.num_kv_heads, self.head_dim)
        return (layer_count, self.num_planes, block_count, self.block_size, *slot)


def _kinds(config: ModelConfig) -> tuple[str, ...]:
    if config.latent is not None:
        return ("latent",) * config.num_layers
    return tuple("full" if window is None else "window" for window in config.windows)
