"""The `baton` command: one sub-command per file, each imported only when it runs.

Turns every BatonError into one sentence on stderr and an exit code: 2 for wrong settings, 1 for
everything else. Imports neither torch nor the services until a command needs them.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.bench_command import bench
from baton.cli.local import LOCAL
from baton.cluster.errors import BatonError, SettingsError
from baton.cluster.workers import Role

WorkerId = Annotated[str, typer.Argument(help="Id of the worker, as baton status shows it.")]
RedisUrl = Annotated[
    str | None, typer.Option(help="Redis of the cluster.", envvar="BATON_REDIS_URL")
]
TlsDir = Annotated[
    Path | None, typer.Option(help="Folder of a certificate for admin.", envvar="BATON_TLS_DIR")
]
TlsServerName = Annotated[
    str | None,
    typer.Option(help="Name in the workers' certificates.", envvar="BATON_TLS_SERVER_NAME"),
]

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
    url: Annotated[str, typer.Option(help="Where Baton answers.")] = LOCAL,
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
    redis: RedisUrl = None,
    url: Annotated[str, typer.Option(help="A router.")] = LOCAL,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Follow until Ctrl-C.")] = False,
) -> None:
    """Show the workers of a cluster and their load."""
    from baton.cli.status import status

    status(redis, url, as_json, watch)


app.command()(bench)


@app.command()
def drain(
    worker: WorkerId,
    redis: RedisUrl = None,
    url: Annotated[str, typer.Option(help="A router.")] = LOCAL,
    timeout: Annotated[float, typer.Option(min=0.0, help="Longest wait in seconds.")] = 60.0,
    undo: Annotated[bool, typer.Option("--undo", help="Take new requests again.")] = False,
    tls_dir: TlsDir = None,
    tls_server_name: TlsServerName = None,
) -> None:
    """Let a worker finish its requests and take no new ones."""
    from baton.cli.drain import drain
    from baton.cluster.tls.folder import open_tls

    drain(worker, redis, url, timeout, undo, open_tls(tls_dir, tls_server_name))


@app.command()
def role(
    worker: WorkerId,
    role: Annotated[Role, typer.Argument(help="What it is to do.")],
    redis: RedisUrl = None,
    url: Annotated[str, typer.Option(help="A router.")] = LOCAL,
    timeout: Annotated[
        float, typer.Option(min=0.0, help="Longest wait for what runs; the rest goes on elsewhere.")
    ] = 60.0,
    tls_dir: TlsDir = None,
    tls_server_name: TlsServerName = None,
) -> None:
    """Let a worker finish its requests, then do the other half of the work."""
    from baton.cli.role import change_role
    from baton.cluster.tls.folder import open_tls

    change_role(worker, role, redis, url, timeout, open_tls(tls_dir, tls_server_name))


@app.command()
def explain(
    prompt: Annotated[str, typer.Argument(help="Text to complete.")],
    url: Annotated[str, typer.Option(help="A router.")] = LOCAL,
    max_tokens: Annotated[int, typer.Option(min=1)] = 16,
    ttft_ms: Annotated[float | None, typer.Option(help="Target for the first token.")] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="Target per further token.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Complete a prompt and show where it went and why."""
    from baton.cli.explain import Question, explain

    explain(Question(url, prompt, max_tokens, ttft_ms, tpot_ms), as_json)


@app.command()
def report(
    sources: Annotated[
        list[str] | None, typer.Argument(help="Routers (merged), or a saved file.")
    ] = None,
    window: Annotated[float, typer.Option(min=1, max=3600, help="Seconds back from now.")] = 3600,
    model: Annotated[str, typer.Option(help="Only this model.")] = "",
    tenant: Annotated[str, typer.Option(help="Only this tenant.")] = "",
    worker: Annotated[str, typer.Option(help="Only what this worker served.")] = "",
    html: Annotated[Path | None, typer.Option(help="Write one HTML file with plots.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write JSON.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write flat rows.")] = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="Write recent requests as a trace for ui.perfetto.dev.")
    ] = None,
    compare: Annotated[bool, typer.Option(help="Show two sources side by side.")] = False,
) -> None:
    """Show where the time of the requests went, and why targets were missed."""
    from baton.cli.report.command import Outputs, compare_two, report
    from baton.cli.report.sources import Question
    from baton.cluster.reports import Filters

    question = Question(window, Filters(model, tenant, worker))
    if compare:
        compare_two(sources or [], question, json_path)
    else:
        report(sources or [LOCAL], question, Outputs(html, json_path, csv, perfetto))


@app.command("kv-size")
def kv_size(
    model: Annotated[str | None, typer.Argument(help="Model in the store, or a path.")] = None,
    layers: Annotated[int | None, typer.Option(min=1)] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1)] = None,
    head_dim: Annotated[int | None, typer.Option(min=1)] = None,
    latent: Annotated[
        int | None, typer.Option(min=1, help="Values of a latent, instead of heads.")
    ] = None,
    window: Annotated[
        int | None, typer.Option(min=1, help="Sliding window of all layers, in tokens.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Element type the model computes in.")] = "bfloat16",
    kv_dtype: Annotated[str, typer.Option(help="auto, fp8, int8 or int4.")] = "auto",
    kv_policy: Annotated[
        str, typer.Option(help="What is kept, such as streaming(sinks=4,window=1024).")
    ] = "full",
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per block.")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="Length of a sequence.")] = 4096,
    params: Annotated[str | None, typer.Option(help="Parameters, such as 135M or 70B.")] = None,
    memory: Annotated[str, typer.Option(help="Memory for the cache.")] = "512MiB",
) -> None:
    """Show how large a KV cache is, with the formula."""
    from baton.cli.kv_size import Question
    from baton.cli.kv_size import kv_size as show

    show(
        Question(
            model,
            layers,
            kv_heads,
            head_dim,
            latent,
            window,
            dtype,
            kv_dtype,
            kv_policy,
            block_size,
            tokens,
            params,
            memory,
        )
    )


def main(argv: list[str] | None = None) -> None:
    """Entry point of the `baton` script; always ends in SystemExit."""
    _mount_model_commands()
    sys.exit(_guarded(lambda: app(args=argv, prog_name="baton", standalone_mode=True)))


def _mount_model_commands() -> None:
    from baton.cli import cache, certs, keys, model

    app.add_typer(model.app, name="model")
    app.add_typer(cache.app, name="cache")
    app.add_typer(certs.app, name="certs")
    app.add_typer(keys.app, name="keys")


def _guarded(command: Callable[[], None]) -> int:
    try:
        command()
    except BatonError as error:
        sys.stderr.write(f"baton: {error}\n")
        return 2 if isinstance(error, SettingsError) else 1
    except OSError as error:
        if error.filename is None:
            raise
        sys.stderr.write(f"baton: {error.filename}: {error.strerror}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
