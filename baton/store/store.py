"""The model store: BATON_HOME/models/NAME, one directory in Hugging Face layout per model.

A model appears by a single rename of a complete directory, made under a lock per name; so a
process that is killed leaves nothing half-usable, and of two that start at once the second uses
what the first made. Importers know formats; nothing here does.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from baton.store import hub
from baton.store.disk import FreeSpace, free_space, require_space, sync
from baton.store.errors import StoreError
from baton.store.gguf_import import GGUFImporter
from baton.store.hf_import import HFDirectoryImporter
from baton.store.importers import Importer
from baton.store.lock import file_lock
from baton.store.manifest import Manifest, describe, read_manifest
from baton.store.progress import Reporter, SilentReporter
from baton.store.source import Source, again, is_name, locate, require_name

LOCK_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class StoredModel:
    """`path` holds config.json, tokenizer.json, … and safetensors weights."""

    name: str
    path: Path
    fingerprint: str


class ModelStore:
    def __init__(
        self,
        home: Path,
        reporter: Reporter | None = None,
        *,
        free: FreeSpace = free_space,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
    ) -> None:
        self._models = home / "models"
        self._reporter = reporter or SilentReporter()
        self._free = free
        self._lock_timeout_s = lock_timeout_s

    def resolve(self, model: str) -> StoredModel:
        """The stored model called `model`, or made from the file, directory or hub id `model`."""
        if is_name(model):
            manifest = read_manifest(self._models / model)
            if manifest is not None:
                return self._usable(manifest)
        source = locate(model)
        for name in (source.name, f"{source.name}-{source.origin.identity[:8]}"):
            if self._belongs(name, source):
                stored = self._ensure(source, name)
                if stored is not None:
                    return stored
        raise StoreError(
            f"The store has other models under the names {source.name} and {name}; "
            "use `baton model add` with --name."
        )

    def add(self, model: str, name: str | None = None) -> StoredModel:
        """Store `model` under `name`; nothing happens if it is there already."""
        if name is None:
            return self.resolve(model)
        source, name = locate(model), require_name(name)
        stored = self._ensure(source, name)
        if stored is None:
            raise StoreError(
                f"The store already has another model called {name!r}; choose another --name, or "
                f"remove it first with `baton model rm {name}`."
            )
        return stored

    def list(self) -> list[Manifest]:
        """Every model, by name; unreadable ones are left out."""
        if not self._models.is_dir():
            return []
        found = (_read_or_none(path) for path in sorted(self._models.iterdir()) if _visible(path))
        return [manifest for manifest in found if manifest is not None]

    def remove(self, name: str) -> None:
        path = self._models / require_name(name)
        if not path.exists():
            raise StoreError(f"There is no model {name!r} in the store; see `baton model ls`.")
        with self._locked(name), _explained(self._models):
            _discard(path, self._scratch(name))

    def verify(self, name: str) -> StoredModel:
        """Read every byte of a stored model and compare it with its checksum."""
        path = self._models / require_name(name)
        manifest = read_manifest(path)
        if manifest is None:
            raise StoreError(f"There is no model {name!r} in the store; see `baton model ls`.")
        with self._reporter.task(f"Verifying model {name}", manifest.size) as advance:
            problem = manifest.full_problem(path, advance)
        if problem is not None:
            raise _damaged(path, problem)
        return self._stored(manifest)

    def _usable(self, manifest: Manifest) -> StoredModel:
        """A model asked for by name: whole, or made anew from where it came from."""
        path = self._models / manifest.name
        problem = manifest.problem(path)
        if problem is None:
            return self._stored(manifest)
        source = again(manifest.origin, manifest.name)
        stored = self._ensure(source, manifest.name) if source else None
        if stored is None:
            raise _damaged(path, problem)
        return stored

    def _belongs(self, name: str, source: Source) -> bool:
        manifest = read_manifest(self._models / name)
        return manifest is None or manifest.origin == source.origin

    def _ensure(self, source: Source, name: str) -> StoredModel | None:
        """The model of `source` under `name`; None if the name means another one."""
        path = self._models / name
        if (manifest := read_manifest(path)) and manifest.origin != source.origin:
            return None
        if manifest and manifest.problem(path) is None:
            return self._stored(manifest)
        with self._locked(name), _explained(self._models):
            if (manifest := read_manifest(path)) and manifest.origin != source.origin:
                return None
            if manifest is None or manifest.problem(path) is not None:
                manifest = self._build(source, name)
            return self._stored(manifest)

    def _build(self, source: Source, name: str) -> Manifest:
        """Make the model in a scratch directory and move it into place. Needs the lock."""
        scratch, target = self._scratch(name), self._models / name
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        try:
            manifest = self._fill(self._importer(source), scratch, source, name)
            if target.exists():
                _discard(target, scratch.with_suffix(".old"))
            os.rename(scratch, target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        sync(self._models)
        return manifest

    def _fill(self, importer: Importer, scratch: Path, source: Source, name: str) -> Manifest:
        require_space(importer.needed_bytes(scratch), self._models, self._free)
        with self._reporter.task(f"Storing model {name}", importer.work_bytes) as advance:
            known = importer.write(scratch, advance)
            manifest = describe(scratch, name, source.origin, known, lambda _: None)
        manifest.write(scratch)
        for file in scratch.iterdir():
            sync(file)
        return manifest

    def _importer(self, source: Source) -> Importer:
        if source.origin.kind == "gguf":
            return GGUFImporter(source.path)
        if source.origin.kind == "hub":
            return HFDirectoryImporter(hub.download(source.origin.location, self._free))
        return HFDirectoryImporter(source.path)

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        def on_wait() -> None:
            self._reporter.note(f"Waiting for another process that is storing model {name}")

        path = self._models / ".locks" / f"{name}.lock"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_write(self._models, error) from error
        with file_lock(path, self._lock_timeout_s, on_wait):
            yield

    def _scratch(self, name: str) -> Path:
        return self._models / ".scratch" / f"{name}.new"

    def _stored(self, manifest: Manifest) -> StoredModel:
        return StoredModel(manifest.name, self._models / manifest.name, manifest.fingerprint)


def _visible(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".")


def _read_or_none(path: Path) -> Manifest | None:
    try:
        return read_manifest(path)
    except StoreError:
        return None


def _discard(path: Path, grave: Path) -> None:
    """Remove a model in one visible step: first its name, then its files."""
    shutil.rmtree(grave, ignore_errors=True)
    grave.parent.mkdir(parents=True, exist_ok=True)
    os.rename(path, grave)
    shutil.rmtree(grave, ignore_errors=True)


@contextmanager
def _explained(models: Path) -> Iterator[None]:
    """Turn what the disk may answer into a sentence."""
    try:
        yield
    except OSError as error:
        raise _cannot_write(models, error) from error


def _cannot_write(models: Path, error: OSError) -> StoreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreError(
            f"The disk of {models} is full; free some space or set BATON_HOME to another disk."
        )
    return StoreError(
        f"The store cannot use {error.filename or models} ({error.strerror}); check its "
        "permissions or set BATON_HOME to a directory that you may write to."
    )


def _damaged(path: Path, problem: str) -> StoreError:
    return StoreError(
        f"The stored model in {path} is damaged, {problem}; remove it with "
        f"`baton model rm {path.name}` and add it again."
    )
