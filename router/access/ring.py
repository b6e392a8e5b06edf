"""The API keys in force: those of a setting, and those of a file, read again when it changes.

A file that has become wrong is told once and the keys read before stay in force. Raises
SettingsError at start.
"""

import hmac
import logging
import os
from pathlib import Path

from baton.cluster.errors import SettingsError
from router.access.caller import ANYBODY, Allowance, Caller
from router.access.keys import ApiKey, hash_of, parse_keys
from router.access.limits import SharedLimits
from router.openai.errors import ApiError

_log = logging.getLogger(__name__)


class KeyRing:
    """`text`: lines as in a file. Without file and text everybody is let in. Without `shared`
    limits are this router's own."""

    def __init__(
        self, text: str = "", path: Path | None = None, shared: SharedLimits | None = None
    ) -> None:
        self.required = bool(text) or path is not None
        self._text = text
        self._path = path
        self._shared = shared
        self._callers: dict[str, Caller] = {}
        self._stamp = self._stamp_now()
        try:
            self._read()
        except (OSError, ValueError) as error:
            raise SettingsError(f"The API keys cannot be read: {error}.") from error

    def caller(self, authorization: str | None) -> Caller:
        """Of a header `Bearer KEY`. Raises ApiError."""
        if not self.required:
            return ANYBODY
        self._follow_file()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _refused("There is no API key: send the header Authorization: Bearer KEY.")
        digest = hash_of(key.strip())
        found = self._callers.get(digest)
        if found is None or found.key is None or not hmac.compare_digest(found.key.sha256, digest):
            raise _refused("The API key is not valid.")
        return found

    def _follow_file(self) -> None:
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._read()
        except (OSError, ValueError) as error:
            _log.error("the API keys of before stay in force: %s", error)

    def _read(self) -> None:
        text = self._path.read_text(encoding="utf-8") if self._path else ""
        keys = parse_keys(f"{self._text}\n{text}")
        self._callers = {key.sha256: self._caller(key) for key in keys}
        if self.required:
            _log.info("%d API keys are in force", len(keys))

    def _caller(self, key: ApiKey) -> Caller:
        """With what it has left, where nothing about it has changed."""
        known = self._callers.get(key.sha256)
        if known is not None and known.key == key:
            return known
        return Caller(key, Allowance(key, self._shared))

    def _stamp_now(self) -> tuple[int, int, int] | None:
        if self._path is None:
            return None
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def _refused(message: str) -> ApiError:
    return ApiError(message, 401, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
