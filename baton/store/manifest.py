"""baton.json: what a stored model is made of, where it came from and its fingerprint.

The manifest is written last into a directory that is then renamed into place, so a model with a
manifest is complete. The fingerprint is a strong hash over config and weights: two workers whose
models have the same one compute the same keys and values.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.store.disk import Advance, sha256_file
from baton.store.errors import StoreError

FILE_NAME = "baton.json"
_FORMAT = 1
_CONFIG = "config.json"
_NOT_THE_MODEL = ("_name_or_path", "transformers_version")


@dataclass(frozen=True)
class StoredFile:
    size: int
    mtime_ns: int
    sha256: str


@dataclass(frozen=True)
class Origin:
    """Where a model came from. `identity` changes when the files there change."""

    kind: str
    location: str
    identity: str


@dataclass(frozen=True)
class Manifest:
    name: str
    fingerprint: str
    origin: Origin
    files: Mapping[str, StoredFile]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())

    def write(self, directory: Path) -> None:
        text = json.dumps({"format": _FORMAT, **asdict(self)}, indent=2, sort_keys=True)
        (directory / FILE_NAME).write_text(text + "\n", encoding="utf-8")

    def problem(self, directory: Path) -> str | None:
        """What is wrong at a glance: presence and size, and content where the time changed."""
        for name, file in self.files.items():
            try:
                stat = (directory / name).stat()
            except OSError:
                return f"{name} is missing"
            if stat.st_size != file.size:
                return f"{name} has {stat.st_size} bytes instead of {file.size}"
            if stat.st_mtime_ns != file.mtime_ns and sha256_file(directory / name) != file.sha256:
                return f"{name} was changed"
        return None

    def full_problem(self, directory: Path, advance: Advance) -> str | None:
        """What is wrong, all bytes compared with their checksums."""
        for name, file in self.files.items():
            try:
                digest = sha256_file(directory / name, advance)
            except OSError:
                return f"{name} is missing or cannot be read"
            if digest != file.sha256:
                return f"{name} does not match its checksum"
        return None


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a stored model; None where there is no such directory."""
    try:
        text = (directory / FILE_NAME).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        if directory.exists():
            raise _unreadable(directory, "is missing") from None
        return None
    try:
        return _parse(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _unreadable(directory, "cannot be read") from error


def _parse(data: dict[str, object]) -> Manifest:
    if data.pop("format") != _FORMAT:
        raise ValueError("unknown format")
    files = {name: StoredFile(**file) for name, file in data.pop("files").items()}  # type: ignore[attr-defined]
    origin = Origin(**data.pop("origin"))  # type: ignore[arg-type]
    return Manifest(origin=origin, files=files, **data)  # type: ignore[arg-type]


def _unreadable(directory: Path, what: str) -> StoreError:
    return StoreError(
        f"{directory} is no complete model, its {FILE_NAME} {what}; "
        f"remove it with `baton model rm {directory.name}` and add the model again."
    )


def describe(
    directory: Path, name: str, origin: Origin, known: Mapping[str, str], advance: Advance
) -> Manifest:
    """Make the manifest of the files in `directory`; `known` holds checksums already taken."""
    files = {}
    for path in sorted(directory.iterdir()):
        digest = known.get(path.name) or sha256_file(path, advance)
        stat = path.stat()
        files[path.name] = StoredFile(stat.st_size, stat.st_mtime_ns, digest)
    return Manifest(name, _fingerprint(directory, files), origin, files)


def _fingerprint(directory: Path, files: Mapping[str, StoredFile]) -> str:
    config = json.loads((directory / _CONFIG).read_text(encoding="utf-8"))
    for key in _NOT_THE_MODEL:
        config.pop(key, None)
    weights = {n: f.sha256 for n, f in files.items() if n.endswith(".safetensors")}
    text = json.dumps({"config": config, "weights": weights}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
