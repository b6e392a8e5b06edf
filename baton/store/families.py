"""The model families that can be served, by the names GGUF and Hugging Face give them."""

from collections.abc import Sequence
from pathlib import Path

from baton.store.errors import StoreError

SUPPORTED = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "phi3",
    "gpt2",
    "gemma",
    "gemma2",
    "gemma3_text",
    "deepseek_v2",
)
SUPPORTED_IN_GGUF = ("llama", "mistral", "qwen2", "qwen3")


def require_family(family: object, where: Path, supported: Sequence[str] = SUPPORTED) -> str:
    """The family, or a StoreError that lists what is supported."""
    if family in supported:
        return str(family)
    raise StoreError(
        f"{where} holds a model of architecture {str(family)!r}, which is not supported; "
        f"choose a model of one of these: {', '.join(supported)}."
    )
