"""The shape of a KV cache as both ends of a hand-off must agree on it. No torch.

Two caches exchange blocks as they are when their layouts are equal; a dtype may differ where
`converts` says so.
"""

from dataclasses import dataclass

from baton.engine.kv.quantized_sizes import KINDS, QuantizedSizes
from baton.engine.model_config import ModelConfig
from baton.kv_policy import states_per_block

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


def kv_dtype(kind: str, compute_dtype: str) -> str:
    """`KVLayout.dtype` of a cache of some kind ("auto" is the model's own dtype)."""
    return compute_dtype if kind == "auto" else f"{kind}/{compute_dtype}"


def converts(prefill: str, decode: str) -> bool:
    """Whether a cache of the first `KVLayout.dtype` can be written into one of the second. What is
    quantized once is not quantized again in another way."""
    kind, _, compute = decode.rpartition("/")
    known = compute in DTYPE_BYTES and (not kind or kind in KINDS)
    return prefill == decode or (prefill in DTYPE_BYTES and known)


@dataclass(frozen=True)
class KVLayout:
    """`layer_kinds[layer]` is "full", "window" or "latent"; `fingerprint` names the weights. A
    latent layer caches one plane (of one head) per token, the others a key and a value plane.
    `dtype` is the element type or, of a quantized cache, the kind and the type of the newest
    tokens, such as "int8/bfloat16"; its blocks are plain bytes."""

    fingerprint: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    layer_kinds: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.compute_dtype not in DTYPE_BYTES:
            raise ValueError(f"KV dtype must be one of {sorted(DTYPE_BYTES)}, not {self.dtype!r}")
        if self.quantized is not None and "latent" in self.layer_kinds:
            raise ValueError(
                f"a cache of latents cannot be {self.dtype}, only of the model's dtype"
            )
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
    def compute_dtype(self) -> str:
        """The element type of what is not quantized."""
        return self.dtype.rpartition("/")[2]

    @property
    def quantized(self) -> QuantizedSizes | None:
        kind = self.dtype.rpartition("/")[0]
        if not kind:
            return None
        return QuantizedSizes(kind, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def num_planes(self) -> int:
        return 1 if "latent" in self.layer_kinds or self.quantized is not None else 2

    @property
    def num_tail_blocks(self) -> int:
        """Blocks that hold a sequence's newest tokens in full precision, beside its others."""
        if self.quantized is None:
            return 0
        return -(-self._full_block_bytes // self.quantized.row_bytes)

    @property
    def states_per_block(self) -> int:
        value_bytes = DTYPE_BYTES[self.compute_dtype]
        return states_per_block(self.block_size, self.head_dim, value_bytes)

    @property
    def bytes_per_token(self) -> int:
        """Keys and values, or latents, of one token over all layers; scales included."""
        return self.bytes_per_block // self.block_size

    @property
    def bytes_per_block(self) -> int:
        if self.quantized is not None:
            return self.num_layers * self.quantized.row_bytes
        return self.num_layers * self._full_block_bytes

    @property
    def _full_block_bytes(self) -> int:
        """Of one layer, not quantized."""
        planes = 1 if "latent" in self.layer_kinds else 2
        values = planes * self.num_kv_heads * self.head_dim
        return self.block_size * values * DTYPE_BYTES[self.compute_dtype]

    def unit_shape(self, layer_count: int, block_count: int) -> tuple[int, ...]:
        """Shape of a hand-off unit: (layer, plane, block, slot, kv_head, head_dim), or
        (layer, 1, block, byte) of a quantized cache."""
        if self.quantized is not None:
            return (layer_count, 1, block_count, self.quantized.row_bytes)
        slot = (self.num_kv_heads, self.head_dim)
        return (layer_count, self.num_planes, block_count, self.block_size, *slot)


def _kinds(config: ModelConfig) -> tuple[str, ...]:
    if config.latent is not None:
        return ("latent",) * config.num_layers
    return tuple("full" if window is None else "window" for window in config.windows)
