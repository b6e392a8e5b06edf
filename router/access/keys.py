"""API keys as a file keeps them: one TOML line per key, with its hash and never the key itself.

    alice = { sha256 = "9f86…", tenant = "acme", requests_per_minute = 60 }

A key is 256 random bits, so one round of SHA-256 is enough: there is nothing to guess.
"""

import hashlib
import secrets
import tomllib
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

PREFIX = "sk-baton-"
_NAME = r"^[A-Za-z0-9_-]{1,64}$"
Limit = Annotated[int, Field(ge=1, le=10**9)]
Tenant = Annotated[str, Field(pattern=r"^[!-~]{1,128}$")]


class ApiKey(BaseModel):
    """One key. Without a limit there is none; without a tenant it is its name."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    name: Annotated[str, Field(pattern=_NAME)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", repr=False)]
    tenant: Tenant = ""
    cache_group: Tenant | None = None
    """Tenants of one group share cached prefixes; without one a tenant has its own."""
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    admin: bool = False
    """May read everything and speak for any tenant."""

    def line(self) -> str:
        """As it stands in a file."""
        fields = self.model_dump(exclude={"name"}, exclude_defaults=True)
        return f"{self.name} = {{ {', '.join(f'{k} = {_toml(v)}' for k, v in fields.items())} }}"


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def parse_keys(text: str) -> tuple[ApiKey, ...]:
    """Raises ValueError with a sentence that names the key and the field."""
    try:
        lines = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"API keys are not valid TOML: {error}") from error
    keys = tuple(key_of(name, fields) for name, fields in lines.items())
    if len({key.sha256 for key in keys}) < len(keys):
        raise ValueError("two API keys have the same hash")
    return keys


def key_of(name: str, fields: Any) -> ApiKey:
    """Raises ValueError with a sentence that names the key and the field."""
    if not isinstance(fields, dict):
        raise ValueError(f"API key {name!r} must be a table with at least sha256")
    try:
        return ApiKey(**{"tenant": name, **fields, "name": name})
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise ValueError(f"API key {name!r}: {field}: {first['msg']}") from error


def _toml(value: str | int | bool) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    # Printable ASCII only, so that JSON's escapes are TOML's.
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return str(value) if isinstance(value, int) else f'"{escaped}"'
