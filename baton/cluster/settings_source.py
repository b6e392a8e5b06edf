"""Where a settings object comes from: flags over BATON_* variables over a TOML file over defaults.

Owns the command-line parser made from the fields, the TOML reader and the wording of errors:
each is a sentence that names the field and what it accepts. Knows no field by name except
`config`. Never exits the process and never prints, except for --help.
"""

import argparse
import sys
import tomllib
from pathlib import Path
from typing import Any, ClassVar, Self, get_args

from pydantic import Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from baton.cluster.errors import SettingsError
from baton.cluster.values import format_cores

ROLE_TABLES = ("up", "router", "prefill", "decode")


def option(
    default: Any, help: str, accepts: str, flag: str = "", bare: str = "", **constraints: Any
) -> Any:
    """A field with its help, the words that complete "FIELD must be …", a second flag, and the
    value of a flag that is given without one."""
    extra: dict[str, Any] = {"accepts": accepts, "flag": flag, "bare": bare}
    return Field(default, description=help, json_schema_extra=extra, **constraints)


class _TomlSource(PydanticBaseSettingsSource):
    """Top-level keys are for every process, a table such as [router] for one process."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        raise NotImplementedError("the file is read as a whole")

    def __call__(self) -> dict[str, Any]:
        path = self.current_state.get("config")
        if path is None:
            return {}
        content = _read_toml(Path(path))
        tables = {name: content.pop(name, {}) for name in ROLE_TABLES}
        table = getattr(self.settings_cls, "table", "")
        own = tables.get(table, {})
        if not isinstance(own, dict):
            raise SettingsError(f"{path}: {table} must be a table.")
        fields = self.settings_cls.model_fields
        _refuse_unknown(path, own, set(fields))
        _refuse_unknown(path, content, _shared_names())
        return {**{key: content[key] for key in content if key in fields}, **own}


def _refuse_unknown(path: Path, keys: dict[str, Any], known: set[str]) -> None:
    unknown = sorted(set(keys) - known)
    if unknown:
        raise SettingsError(f"{path}: there is no setting named {unknown[0]!r}.")


def _shared_names() -> set[str]:
    """What may stand outside a table: any setting of a router or worker."""
    classes, names = [Settings], set()
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        names |= set(cls.model_fields) if cls.table in ("router", "prefill", "decode") else set()
    return names


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"Cannot read --config {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"--config {path} is not valid TOML: {error}.") from error


class Settings(BaseSettings):
    """Base of every process' settings; build with `load`, turn into flags with `to_flags`."""

    model_config = SettingsConfigDict(
        env_prefix="BATON_", env_ignore_empty=True, extra="forbid", frozen=True
    )
    table: ClassVar[str] = ""
    config: Path | None = option(None, "TOML file with settings", "a path to a TOML file")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, EnvSettingsSource(settings_cls), _TomlSource(settings_cls)

    @classmethod
    def load(cls, argv: list[str], prog: str = "baton") -> Self:
        """Settings from flags and everything below them. Raises SettingsError; --help exits 0."""
        return cls.build(**parse_flags(cls, argv, prog))

    @classmethod
    def build(cls, **values: Any) -> Self:
        """As `load`, with keyword arguments in place of flags."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise SettingsError(_sentence(cls, error.errors()[0])) from error

    def to_flags(self) -> list[str]:
        """Flags that rebuild this object in another process, whatever its environment."""
        flags: list[str] = []
        for name in type(self).model_fields:
            value = getattr(self, name)
            if name != "config" and value is not None:
                flags += _to_flag(name, value)
        return flags


def _to_flag(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    if isinstance(value, tuple):
        value = format_cores(value)
    return [f"{flag}={value}"]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise SettingsError(f"{self.prog}: {message} (see {self.prog} --help).")


def parse_flags(cls: type[Settings], argv: list[str], prog: str) -> dict[str, Any]:
    """The fields given as flags, unchecked. Raises SettingsError; --help exits 0."""
    parser = _Parser(prog=prog, allow_abbrev=False, description=cls.__doc__)
    for name, field in cls.model_fields.items():
        names, help_text = flag_names(name, field), _help(field)
        if field.annotation in (bool, bool | None):
            parser.add_argument(
                *names, action=argparse.BooleanOptionalAction, default=None, help=help_text
            )
        else:
            bare = _extra(field, "bare")
            optional: dict[str, Any] = {"nargs": "?", "const": bare} if bare else {}
            parser.add_argument(
                *names, dest=name, metavar="VALUE", default=None, help=help_text, **optional
            )
    given = vars(parser.parse_args(argv))
    return {name: value for name, value in given.items() if value is not None}


def flag_names(name: str, field: FieldInfo) -> list[str]:
    second = _extra(field, "flag")
    return [f"--{name.replace('_', '-')}", *([second] if second else [])]


def _extra(field: FieldInfo, key: str) -> str:
    extra = field.json_schema_extra
    return str(extra.get(key) or "") if isinstance(extra, dict) else ""


def _help(field: FieldInfo) -> str:
    default = field.default
    shown = "" if default is None or field.default_factory else f" (default: {default})"
    return f"{field.description}{shown}".replace("%", "%%")


def _sentence(cls: type[Settings], details: ErrorDetails) -> str:
    if not details["loc"]:
        return details["msg"].removeprefix("Value error, ")
    name = str(details["loc"][0])
    field = cls.model_fields.get(name)
    if field is None:
        return f"There is no setting named {name}."
    accepts = _extra(field, "accepts")
    return f"--{name.replace('_', '-')} must be {accepts}, not {details['input']!r}."


def choices(literal: Any) -> str:
    """ "a, b or c" from a Literal."""
    *head, last = (str(value) for value in get_args(literal))
    return f"{', '.join(head)} or {last}" if head else last


def load_or_exit(cls: type[Settings], argv: list[str], prog: str) -> Any:
    """`load` for a `__main__`: a wrong setting is one sentence on stderr and exit code 2."""
    try:
        return cls.load(argv, prog)
    except SettingsError as error:
        sys.exit(fail(error))


def fail(error: Exception) -> int:
    """Says the error on stderr; the exit code of a configuration error."""
    sys.stderr.write(f"baton: {error}\n")
    return 2
