"""The `baton` command: one sub-command per file, each imported only when it runs.

Turns every BatonError into one sentence on stderr and an exit code: 2 for wrong settings, 1 for
everything else. Imports neither torch nor the services until a command needs them.
"""

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from baton.cluster.errors import BatonError, SettingsError

app = typer.Typer(
    name="baton",
    help="Serve a language model with prefill and decode apart.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# These commands hand their arguments, --help included, to the settings object they build.
_PASS_THROUGH = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}


@app.command(context_settings=_PASS_THROUGH)
def up(context: typer.Context) -> None:
    """Run a whole cluster on this machine: router, workers and Redis."""
    from baton.cli.up import up as run

    raise typer.Exit(run(context.args))


@app.command(context_settings=_PASS_THROUGH)
def router(context: typer.Context) -> None:
    """Run a router: the OpenAI-compatible HTTP gateway."""
    from baton.cli.services import run_router

    raise typer.Exit(run_router(context.args))


@app.command(context_settings=_PASS_THROUGH)
def prefill(context: typer.Context) -> None:
    """Run one prefill worker."""
    from baton.cli.services import run_prefill

    raise typer.Exit(run_prefill(context.args))


@app.command(context_settings=_PASS_THROUGH)
def decode(context: typer.Context) -> None:
    """Run one decode worker."""
    from baton.cli.services import run_decode

    raise typer.Exit(run_decode(context.args))


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="Where Baton answers.")] = "http://127.0.0.1:8000",
    message: Annotated[str | None, typer.Option(help="Ask once and end.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    model: Annotated[str | None, typer.Option(help="Model (default: the first served).")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0)] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1)] = 512,
) -> None:
    """Talk to the model."""
    from baton.cli.chat import Conversation, chat

    chat(Conversation(url, model, system, temperature, max_tokens), message)


@app.command()
def status(
    redis: Annotated[
        str | None, typer.Option(help="Redis of the cluster.", envvar="BATON_REDIS_URL")
    ] = None,
    url: Annotated[str, typer.Option(help="A router.")] = "http://127.0.0.1:8000",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the workers of a cluster and their load."""
    from baton.cli.status import status

    status(redis, url, as_json)


@app.command("kv-size")
def kv_size(
    model: Annotated[str | None, typer.Argument(help="Model in the store, or a path.")] = None,
    layers: Annotated[int | None, typer.Option(min=1)] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1)] = None,
    head_dim: Annotated[int | None, typer.Option(min=1)] = None,
    dtype: Annotated[str, typer.Option(help="Element type of the cache.")] = "bfloat16",
    tokens: Annotated[int, typer.Option(min=1, help="Length of a sequence.")] = 4096,
    params: Annotated[str | None, typer.Option(help="Parameters, such as 135M or 70B.")] = None,
    memory: Annotated[str, typer.Option(help="Memory for the cache.")] = "512MiB",
) -> None:
    """Show how large a KV cache is, with the formula."""
    from baton.cli.kv_size import Question, kv_size

    kv_size(Question(model, layers, kv_heads, head_dim, dtype, tokens, params, memory))


def main(argv: list[str] | None = None) -> None:
    """Entry point of the `baton` script; always ends in SystemExit."""
    _mount_model_commands()
    sys.exit(_guarded(lambda: app(args=argv, prog_name="baton", standalone_mode=True)))


def _mount_model_commands() -> None:
    from baton.cli import model

    app.add_typer(model.app, name="model")


def _guarded(command: Callable[[], None]) -> int:
    try:
        command()
    except BatonError as error:
        sys.stderr.write(f"baton: {error}\n")
        return 2 if isinstance(error, SettingsError) else 1
    except KeyboardInterrupt:
        return 130
    return 0
