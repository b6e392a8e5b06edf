"""`baton keys`: API keys of the gateway. Shows a new key once, and the line that a file keeps."""

import os
from pathlib import Path
from typing import Annotated

import typer

from baton.cluster.errors import BatonError, SettingsError
from router.access.keys import ApiKey, hash_of, key_of, new_key, parse_keys

app = typer.Typer(help="API keys of the gateway.", no_args_is_help=True)


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the key: letters, digits, - and _.")],
    tenant: Annotated[str | None, typer.Option(help="Its tenant (default: its name).")] = None,
    cache_group: Annotated[
        str | None, typer.Option(help="Tenants of one group share cached prefixes.")
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    admin: Annotated[
        bool, typer.Option("--admin", help="May read everything and speak for any tenant.")
    ] = False,
    file: Annotated[
        Path | None, typer.Option(help="Append the line to this file, which routers follow.")
    ] = None,
) -> None:
    """Make a key. It is shown once: only its hash is kept."""
    key = new_key()
    try:
        fields = {
            "sha256": hash_of(key),
            "tenant": tenant or name,
            "cache_group": cache_group,
            "requests_per_minute": requests_per_minute,
            "tokens_per_minute": tokens_per_minute,
            "admin": admin,
        }
        entry = key_of(name, fields)
    except ValueError as error:
        raise SettingsError(f"There can be no such key: {error}.") from error
    if file is None:
        typer.echo(f"key:  {key}\nline: {entry.line()}")
        return
    _append(file, entry)
    typer.echo(key)


@app.command("ls")
def ls(file: Annotated[Path, typer.Argument(help="A file of keys.")]) -> None:
    """List the keys of a file; their hashes are left out."""
    for key in _keys(file):
        shown = key.model_dump(exclude={"sha256"}, exclude_defaults=True)
        typer.echo("  ".join(f"{name}={value}" for name, value in shown.items()))


def _append(file: Path, entry: ApiKey) -> None:
    if file.exists():
        if any(key.name == entry.name for key in _keys(file)):
            raise BatonError(f"{file} has a key named {entry.name} already.")
        try:
            parse_keys(f"{file.read_text(encoding='utf-8')}\n{entry.line()}")
        except ValueError as error:
            raise BatonError(
                f"A line at the end of {file} would belong to its last table. "
                "Write its keys as lines `name = {...}`, as `baton keys new` does."
            ) from error
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "a+b") as lines:
            size = lines.seek(0, os.SEEK_END)
            lines.seek(max(0, size - 1))
            own_line = b"" if lines.read() in (b"", b"\n") else b"\n"
            lines.write(own_line + entry.line().encode() + b"\n")
    except OSError as error:
        raise BatonError(f"{file} cannot be written: {error.strerror}.") from error


def _keys(file: Path) -> tuple[ApiKey, ...]:
    try:
        return parse_keys(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BatonError(f"{file} cannot be read: {error}") from error
