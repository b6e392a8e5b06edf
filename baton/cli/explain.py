"""`baton explain`: completes one prompt and shows the router's decision, its numbers and the
alternatives, as a table or as JSON.
"""

import json
import math
import sys
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from baton.cli.local import key_headers
from baton.cluster.errors import BatonError, SettingsError

TIMEOUT_S = 120.0
_TIMES = ("queue", "prefill", "ttft", "tpot", "harm")
PIPE_WIDTH = 120


@dataclass(frozen=True)
class Question:
    url: str
    prompt: str
    max_tokens: int
    ttft_ms: float | None
    tpot_ms: float | None


def explain(question: Question, as_json: bool) -> None:
    """Raises BatonError when the router does not answer or refuses."""
    for name in ("ttft_ms", "tpot_ms"):
        if not math.isfinite(getattr(question, name) or 0.0):
            raise SettingsError(f"--{name.replace('_', '-')} must be a number of milliseconds.")
    decision = _ask(question)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    if as_json:
        console.out(json.dumps(decision, indent=2))
        return
    console.print(table(decision))
    console.print(f"Measured time to first token: {decision['measured_ttft_ms']:.1f} ms.")


def table(decision: dict[str, Any]) -> Table:
    """The chosen way first; times in milliseconds."""
    targets = decision["targets"]
    wanted = ", ".join(
        f"{name} {targets[f'{name}_ms']:g} ms"
        for name in ("ttft", "tpot")
        if targets[f"{name}_ms"] is not None
    )
    view = Table(title=f"{decision['policy']}: {wanted or 'no targets'}", box=None, pad_edge=False)
    for column in ("", "prefill", "decode", "cached"):
        view.add_column(column)
    for column in _TIMES:
        view.add_column(column, justify="right")
    view.add_column("targets")
    for number, way in enumerate((decision["chosen"], *decision["alternatives"])):
        view.add_row(
            "" if number else "chosen",
            way["prefill"] or "(decode)",
            way["decode"] or "-",
            f"{way['cached_tokens']}/{way['cached_tokens'] + way['uncached_tokens']}",
            *(f"{way[f'{name}_ms']:.1f}" for name in _TIMES),
            "kept" if way["meets_targets"] else f"missed by {way['miss']:.0%}",
        )
    return view


def _ask(question: Question) -> dict[str, Any]:
    slo = {"ttft_ms": question.ttft_ms, "tpot_ms": question.tpot_ms}
    body = {"prompt": question.prompt, "max_tokens": question.max_tokens, "slo": slo}
    try:
        answer = httpx.post(
            f"{question.url.rstrip('/')}/v1/completions",
            json=body,
            headers={"x-baton-explain": "1", **key_headers()},
            timeout=TIMEOUT_S,
            trust_env=False,
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise BatonError(f"No router answers at {question.url}: {error}.") from error
    try:
        content = answer.json()
        if answer.is_success:
            decision: dict[str, Any] = content["placement"][0]
            return decision
        raise BatonError(str(content["error"]["message"]))
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise BatonError(f"{question.url} does not explain itself; is it a router?") from error
