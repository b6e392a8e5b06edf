"""`baton model`: add, list, verify and remove the models in the store.

Only talks: what a model is and where it lives is the store's. Results go to stdout, progress and
errors to stderr; a StoreError becomes its sentence and exit code 1.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from baton.store import StoreError, open_store
from baton.store.manifest import Manifest

app = typer.Typer(help="The models in the store.", no_args_is_help=True)

ModelName = Annotated[str, typer.Argument(help="Name in the store, as `baton model ls` shows it.")]


@app.command()
def add(
    model: Annotated[
        str,
        typer.Argument(
            metavar="PATH|HUB_ID",
            help="A .gguf file, a Hugging Face directory, a hub id, or smollm2.",
        ),
    ],
    name: Annotated[
        str | None, typer.Option(help="Name in the store; by default after the source.")
    ] = None,
) -> None:
    """Convert or link a model into the store."""
    with _sentences():
        stored = open_store().add(model, name)
        typer.echo(f"{stored.name} is stored in {stored.path}")


@app.command()
def ls() -> None:
    """List the models in the store."""
    with _sentences():
        manifests = open_store().list()
    rows = [("NAME", "SIZE", "FINGERPRINT", "FROM"), *map(_row, manifests)]
    width = max(len(row[0]) for row in rows)
    for name, size, fingerprint, origin in rows if manifests else ():
        typer.echo(f"{name:{width}}  {size:>10}  {fingerprint:12}  {origin}")
    if not manifests:
        typer.echo("The store is empty; add a model with `baton model add PATH|HUB_ID`.", err=True)


def _row(manifest: Manifest) -> tuple[str, str, str, str]:
    size = f"{manifest.size / (1 << 20):,.0f} MiB"
    return manifest.name, size, manifest.fingerprint[:12], manifest.origin.location


@app.command()
def verify(name: ModelName) -> None:
    """Compare every byte of a model with its checksum."""
    with _sentences():
        stored = open_store().verify(name)
        typer.echo(f"{stored.name} is intact, fingerprint {stored.fingerprint}")


@app.command()
def rm(name: ModelName) -> None:
    """Remove a model from the store; its source is not touched."""
    with _sentences():
        open_store().remove(name)
        typer.echo(f"{name} is removed")


@contextmanager
def _sentences() -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
