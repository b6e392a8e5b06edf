"""`baton cache`: what the workers' prefix caches hold, and how to pin, unpin and flush it."""

import json
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from baton.cli.local import LOCAL, key_headers
from baton.cluster.errors import BatonError

TIMEOUT_S = 120.0
Url = Annotated[str, typer.Option(help="A router.")]
app = typer.Typer(help="Show and steer the prefix caches of a cluster.", no_args_is_help=True)


@app.command("ls")
def show(
    url: Url = LOCAL,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what every worker has cached and pinned."""
    workers = _call("GET", url, "/v1/cache")["data"]
    console = Console(highlight=False)
    if as_json:
        console.out(json.dumps(workers, indent=2))
        return
    console.print(_caches(workers))
    if pins := _pins(workers):
        console.print(pins)


@app.command()
def pin(
    text: Annotated[str, typer.Argument(help="Beginning of prompts; a system prompt with --chat.")],
    url: Url = LOCAL,
    ttl: Annotated[str, typer.Option(help="How long, such as 5m or 1h.")] = "5m",
    chat: Annotated[bool, typer.Option("--chat", help="Of chats, as their system prompt.")] = False,
    salt: Annotated[str | None, typer.Option(help="cache_salt of the requests to come.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Whose quota it counts against.")] = None,
) -> None:
    """Compute a text and keep it cached, for the requests that will begin with it."""
    control = {"type": "ephemeral", "ttl": ttl}
    body: dict[str, Any] = {"max_tokens": 1, "cache_salt": salt}
    if chat:
        part = {"type": "text", "text": text, "cache_control": control}
        start = [{"role": "system", "content": [part]}, {"role": "user", "content": "."}]
        path, body = "/v1/chat/completions", body | {"messages": start}
    else:
        path, body = "/v1/completions", body | {"prompt": text, "cache_control": control}
    usage = _call("POST", url, path, body, {"x-baton-tenant": tenant} if tenant else {})["usage"]
    known = usage["prompt_tokens_details"]["cached_tokens"]
    Console(highlight=False).print(
        f"Pinned the full blocks of it for {ttl}; {known} of {usage['prompt_tokens']} tokens were "
        "cached already."
    )


@app.command()
def unpin(
    pin_id: Annotated[str, typer.Argument(metavar="PIN", help="As baton cache ls shows it.")],
    url: Url = LOCAL,
) -> None:
    """End a pin before its time; what it covers may be evicted again."""
    workers = _call("DELETE", url, f"/v1/cache/pins/{pin_id}")["data"]
    _say_errors(workers)
    names = ", ".join(worker["worker"] for worker in workers if worker.get("unpinned"))
    Console(highlight=False).print(f"Unpinned on {names or 'no worker that answered'}.")


@app.command()
def flush(url: Url = LOCAL) -> None:
    """Forget all that is cached on every worker, and all pins."""
    workers = _call("POST", url, "/v1/cache/flush")["data"]
    _say_errors(workers)
    count = sum(worker.get("flushed_blocks", 0) for worker in workers)
    Console(highlight=False).print(f"Flushed {count} blocks on {len(workers)} workers.")


def _caches(workers: list[dict[str, Any]]) -> Table:
    names = ("known", "idle", "pinned", "reused", "evicted")
    view = Table(box=None, pad_edge=False)
    for column in ("worker", "role"):
        view.add_column(column)
    for column in names:
        view.add_column(column, justify="right")
    for worker in workers:
        values = [str(worker.get(f"{name}_blocks", "-")) for name in names]
        view.add_row(worker["worker"], worker["role"], *values)
    return view


def _pins(workers: list[dict[str, Any]]) -> Table | None:
    rows = [(worker["worker"], pin) for worker in workers for pin in worker.get("pins", ())]
    if not rows:
        return None
    view = Table(box=None, pad_edge=False)
    for column in ("pin", "worker", "tenant", "tokens", "cached", "ends in"):
        view.add_column(column, no_wrap=column == "pin")
    for worker, pin in rows:
        tokens, cached = str(pin["tokens"]), str(pin["cached_tokens"])
        ends = f"{pin['expires_in_s']:.0f} s"
        view.add_row(pin["id"], worker, pin["tenant"] or "-", tokens, cached, ends)
    return view


def _say_errors(workers: list[dict[str, Any]]) -> None:
    for worker in workers:
        if "error" in worker:
            typer.echo(f"{worker['worker']} does not answer: {worker['error']}", err=True)


def _call(
    method: str,
    url: str,
    path: str,
    body: dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
) -> dict[str, Any]:
    try:
        answer = httpx.request(
            method,
            f"{url.rstrip('/')}{path}",
            json=body,
            headers=key_headers() | (headers or {}),
            timeout=TIMEOUT_S,
            trust_env=False,
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise BatonError(f"No router answers at {url}: {error}.") from error
    try:
        content: dict[str, Any] = answer.json()
        if answer.is_success:
            return content
        raise BatonError(str(content["error"]["message"]))
    except (ValueError, KeyError, TypeError) as error:
        raise BatonError(f"{url} does not answer like a router: HTTP {answer.status_code}.") from (
            error
        )
