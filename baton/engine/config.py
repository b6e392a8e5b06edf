"""Limits and switches of one engine. Built once at start, checked here, passed by constructor."""

from dataclasses import dataclass

from baton.kv_policy import FULL, KVPolicy, parse_policy


@dataclass(frozen=True)
class EngineConfig:
    """Sizes are in tokens unless a name says blocks or sequences."""

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 64
    max_model_len: int = 8192
    """Longest prompt plus output; `capacity` lowers it to what the pool can hold."""
    chunk_size: int = 512
    """Token budget of one step: the longest prefill chunk, shared with the decodes."""
    max_queue: int = 256
    """Sequences that may wait for their first step."""
    enable_prefix_cache: bool = True
    eos_token_ids: tuple[int, ...] = ()
    fingerprint: str = ""
    kv_dtype: str = "bfloat16"
    num_tail_blocks: int = 0
    """Blocks that each sequence holds for its newest tokens, beside those of its table."""
    kv_policy: KVPolicy = FULL
    """Of requests that name none."""
    kv_policies: tuple[str, ...] = ("full",)
    """Names of those that a request may have."""
    states_per_block: int = 1
    """Cached tokens whose state (of a policy that keeps one) fits into a block."""

    def __post_init__(self) -> None:
        for name in (
            "num_blocks", "block_size", "max_num_seqs", "max_model_len", "chunk_size", "max_queue"
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.chunk_size < self.max_num_seqs:
            raise ValueError(
                f"chunk_size ({self.chunk_size}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence takes one token of a step"
            )

        if self.num_blocks <= self.num_tail_blocks:
            raise ValueError(
                f"num_blocks ({self.num_blocks}) must be above the {self.num_tail_blocks} that a "
                "sequence of a quantized cache holds for its newest tokens"
            )

    def policy(self, text: str) -> KVPolicy:
        """Of a request that says `text`, or nothing. ValueError names the field."""
        if not text:
            return self.kv_policy
        try:
            policy = parse_policy(text)
        except ValueError as error:
            raise ValueError(f"kv_policy: {error}") from error
        if policy.name not in self.kv_policies:
            raise ValueError(f"kv_policy: {policy.name} cannot be had with this model and cache")
        return policy

    @property
    def capacity(self) -> int:
        """Longest prompt plus output that can ever be held."""
        return min(self.max_model_len, (self.num_blocks - self.num_tail_blocks) * self.block_size)
