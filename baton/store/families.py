"""The model families that can be served, by the names GGUF and Hugging Face give them."""

from pathlib import Path

from baton.store.errors import StoreError

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")


def require_family(family: object, where: Path) -> str:
    """The family, or a StoreError that lists what is supported."""
    if family in SUPPORTED:
        return str(family)
    raise StoreError(
        f"{where} holds a model of architecture {str(family)!r}, which is not supported; "
        f"choose a model of one of these: {', '.join(SUPPORTED)}."
    )
