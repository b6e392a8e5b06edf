"""The options of `baton bench`; what they do is in `bench`, imported when it runs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from baton.cli.local import LOCAL, key_headers

BenchEndpoint = Literal["completions", "chat"]


def bench(
    url: Annotated[str, typer.Option(help="An OpenAI-compatible server.")] = LOCAL,
    model: Annotated[str | None, typer.Option(help="Model (default: the first served).")] = None,
    endpoint: Annotated[BenchEndpoint, typer.Option(help="What to call.")] = "completions",
    requests: Annotated[int, typer.Option("-n", "--requests", min=1, help="How many.")] = 100,
    concurrency: Annotated[
        int | None,
        typer.Option("-c", "--concurrency", min=1, help="Requests in flight: exactly, or at most."),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=1e-6, help="Requests per second; without it a closed loop.")
    ] = None,
    burstiness: Annotated[
        float, typer.Option(min=1e-3, help="1 is Poisson, less is burstier, inf is even.")
    ] = 1.0,
    trace: Annotated[
        Path | None, typer.Option(help="Mooncake JSONL, Azure CSV or plain JSONL to replay.")
    ] = None,
    scale_length: Annotated[float, typer.Option(min=1e-6, help="Factor on lengths.")] = 1.0,
    scale_time: Annotated[float, typer.Option(min=0, help="Factor on times.")] = 1.0,
    input_tokens: Annotated[int, typer.Option(min=1, help="Prompt length.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, help="Answer length.")] = 64,
    shared_prefix: Annotated[int, typer.Option(min=0, help="Tokens all prompts share.")] = 0,
    spread: Annotated[float, typer.Option(min=0, max=1, help="Lengths vary by ± so much.")] = 0.0,
    ttft_ms: Annotated[float | None, typer.Option(min=0, help="Target for goodput.")] = None,
    tpot_ms: Annotated[float | None, typer.Option(min=0, help="Target for goodput.")] = None,
    e2e_ms: Annotated[float | None, typer.Option(min=0, help="Target for goodput.")] = None,
    sweep: Annotated[bool, typer.Option(help="Raise the rate until the knee is found.")] = False,
    seed: Annotated[int, typer.Option(help="Same seed, same load.")] = 0,
    text: Annotated[bool, typer.Option(help="Prompts as text, not as token ids.")] = False,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for answers of full length.")] = True,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one request.")] = 600.0,
    header: Annotated[list[str] | None, typer.Option(help="NAME: VALUE to send along.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write figures here.")] = None,
    samples: Annotated[bool, typer.Option(help="With every request in the JSON.")] = False,
) -> None:
    """Measure a server under load: TTFT, TPOT, ITL, throughput, goodput."""
    from baton.cli.bench import Bench, bench, headers_of, targets_of

    what = Bench(
        url=url,
        model=model,
        endpoint=endpoint,
        requests=requests,
        concurrency=concurrency,
        rate=rate,
        burstiness=burstiness,
        trace=trace,
        scale_length=scale_length,
        scale_time=scale_time,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        shared_prefix=shared_prefix,
        spread=spread,
        seed=seed,
        prompt_as_text=text,
        ignore_eos=ignore_eos,
        timeout_s=timeout,
        targets=targets_of(ttft_ms, tpot_ms, e2e_ms),
        headers={**key_headers(), **headers_of(header or [])},
    )
    bench(what, sweep, json_path, samples)
