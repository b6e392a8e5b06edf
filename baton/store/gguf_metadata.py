"""Typed reading of a GGUF file's metadata: a value of the right kind, or a StoreError."""

from pathlib import Path
from typing import Any

from baton.store.errors import StoreError
from baton.store.gguf_file import GGUFFile


class Metadata:
    """Hyper-parameters are read under the architecture's prefix, the rest by full key."""

    def __init__(self, file: GGUFFile) -> None:
        self.path: Path = file.path
        self._values = file.metadata
        self.architecture = self.text("general.architecture")

    def raw(self, key: str) -> Any:
        return self._values.get(key)

    def text(self, key: str, default: str | None = None) -> str:
        return self._typed(key, str, default)

    def flag(self, key: str, default: bool) -> bool:
        return self._typed(key, bool, default)

    def token_id(self, key: str) -> int | None:
        value = self.raw(f"tokenizer.ggml.{key}_token_id")
        return value if isinstance(value, int) and 0 <= value < 2**31 else None

    def strings(self, key: str) -> list[str]:
        return self._typed(key, list, None)

    def param(self, key: str, default: int | None = None) -> int:
        """An integer; a per-layer array is accepted where all its entries are equal."""
        full = f"{self.architecture}.{key}"
        value = self.raw(full)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(full, value)
        return value

    def real(self, key: str, default: float | None = None) -> float:
        full = f"{self.architecture}.{key}"
        value = self.raw(full)
        if value is None and default is not None:
            return default
        if not isinstance(value, float | int):
            raise self._wrong(full, value)
        return _shortest(float(value))

    def _typed(self, key: str, kind: type, default: Any) -> Any:
        value = self._values.get(key, default)
        if not isinstance(value, kind):
            raise self._wrong(key, value)
        return value

    def _wrong(self, key: str, value: Any) -> StoreError:
        if value is None:
            return StoreError(
                f"{self.path} lacks the metadata {key!r}, so it is incomplete; "
                "get a GGUF made with a current llama.cpp."
            )
        return StoreError(
            f"{self.path} has {key} = {str(value)[:60]}, which is not supported; "
            "get another conversion of the model."
        )


def _shortest(value: float) -> float:
    """The decimal that was meant: metadata holds 1e-5 as the float32 9.999999747e-06."""
    return float(f"{value:.7g}")
