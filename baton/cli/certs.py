"""`baton certs`: a private certificate authority for the processes of a cluster.

Only talks and reads the arguments; what a certificate says and who may read which file is
`baton.cluster.tls`'s.
"""

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from baton.cluster.tls import authority as tls
from baton.cluster.tls.keeper import Keeper
from baton.cluster.tls.peers import ROLES

app = typer.Typer(
    help="A private certificate authority for mutual TLS between processes.", no_args_is_help=True
)

Authority = Annotated[
    Path, typer.Option("--authority", "-a", help="Folder of the authority; keep it off servers.")
]
HERE = Path("baton-certs")
MAX_DAYS = 36_500


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="A new folder for the authority.")] = HERE,
    days: Annotated[
        float, typer.Option(min=0.01, max=MAX_DAYS, help="Life of the authority.")
    ] = 3650,
) -> None:
    """Make an authority: ca.crt, and ca.key which only its owner can read."""
    tls.create(folder, timedelta(days=days))
    typer.echo(f"{folder} holds an authority for {days:g} days.")


@app.command()
def issue(
    role: Annotated[str, typer.Argument(help=f"One of {', '.join(ROLES)}.")],
    folder: Annotated[Path, typer.Argument(help="Where the files go: the process' --tls-dir.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or address that others call it by; repeat for more."),
    ] = None,
    hours: Annotated[
        float, typer.Option(min=0.001, max=MAX_DAYS * 24, help="Life of the certificate.")
    ] = 24.0,
    authority: Authority = HERE,
) -> None:
    """Issue a certificate for a process: ca.crt, tls.crt and tls.key."""
    order = tls.Order(role, tuple(host or ()), timedelta(hours=hours))
    tls.issue(authority, folder, order)
    typer.echo(_line(folder))


@app.command()
def renew(
    folders: Annotated[list[Path], typer.Argument(help="Folders to look at.")],
    force: Annotated[bool, typer.Option("--force", help="Also what is not due.")] = False,
    authority: Authority = HERE,
) -> None:
    """Replace certificates in the last third of their life; processes notice by themselves."""
    for folder in folders:
        renewed = tls.renew(authority, folder, always=force)
        typer.echo(f"{'renewed ' if renewed else 'not due '} {_line(folder)}")


@app.command()
def keep(
    folder: Annotated[Path, typer.Argument(help="Gets a folder for each role.")],
    host: Annotated[
        list[str], typer.Option(help="Name or address of workers and gateway; repeat for more.")
    ],
    hours: Annotated[
        float, typer.Option(min=0.001, max=MAX_DAYS * 24, help="Life of the certificates.")
    ] = 24.0,
    authority: Authority = HERE,
) -> None:
    """Make an authority and certificates for a whole cluster, and renew them until stopped."""
    keeper = Keeper(authority, folder, host, timedelta(hours=hours))
    while True:
        due_s = keeper.renew()
        typer.echo(f"{folder} is fresh; the next certificate is due in {due_s / 3600:.1f} h")
        time.sleep(due_s)


@app.command()
def show(folders: Annotated[list[Path], typer.Argument(help="Folders to look at.")]) -> None:
    """Tell whose certificates these are and until when they count."""
    for folder in folders:
        typer.echo(_line(folder))


def _line(folder: Path) -> str:
    found = tls.read(folder)
    left = found.ends - datetime.now(UTC)
    state = f"{left.total_seconds() / 3600:.1f} h left" if left > timedelta(0) else "EXPIRED"
    hosts = ", ".join(found.order.hosts) or "no host"
    who = f"{found.order.role or 'no role'} for {hosts}"
    return f"{folder}: {who}, until {found.ends:%F %T} UTC ({state})"
