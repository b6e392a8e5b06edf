"""Where reports come from: routers, whose windows merge, or JSON files that were saved."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from baton.cli.local import key_headers
from baton.cluster.errors import BatonError
from baton.cluster.reports import Filters, build_report
from baton.cluster.reports.window import Slot, merged

TIMEOUT_S = 30.0
KINDS = ("baton-report", "baton-bench")


@dataclass(frozen=True)
class Question:
    """`window_s` and `filters` apply to routers; files are as they were saved."""

    window_s: float
    filters: Filters


def load(sources: Sequence[str], question: Question) -> dict[str, Any]:
    """One report of one file, or of one or several routers. Raises BatonError."""
    files = [source for source in sources if not _is_url(source)]
    if files and len(sources) > 1:
        raise BatonError("Only routers can be merged; give one file, or two with --compare.")
    return read_file(Path(files[0])) if files else from_routers(sources, question)


def from_routers(urls: Sequence[str], question: Question) -> dict[str, Any]:
    answers = [
        get(url, "/v1/reports", {"raw": "true", "window": question.window_s}) for url in urls
    ]
    # Routers of one cluster answer for each other: each counts once.
    routers = {router["id"]: router["slots"] for answer in answers for router in answer["routers"]}
    slots = [Slot.from_json(raw) for slots in routers.values() for raw in slots]
    now = max(answer["now"] for answer in answers)
    report = build_report(merged(slots), question.filters, now)
    missing = sorted({sentence for answer in answers for sentence in answer["missing"]})
    return {**report, "routers": len(routers), "missing": missing, "sources": list(urls)}


def read_file(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BatonError(f"{path} is not a report: {error}.") from error
    if not isinstance(found, dict) or found.get("kind") not in KINDS:
        raise BatonError(f"{path} is neither of `baton report --json` nor of `baton bench --json`.")
    return found


def requests_of(urls: Sequence[str], limit: int) -> list[dict[str, Any]]:
    """Recent requests with their phases, newest first."""
    found = []
    for url in urls:
        rows = get(url, "/v1/requests", {"limit": limit})["data"]
        for row in rows:
            found.append(get(url, f"/v1/requests/{row['id']}", {}))
    return found


def get(url: str, path: str, parameters: dict[str, Any]) -> dict[str, Any]:
    try:
        answer = httpx.get(
            url.rstrip("/") + path,
            params=parameters,
            headers=key_headers(),
            timeout=TIMEOUT_S,
            trust_env=False,
        )
        answer.raise_for_status()
        content: dict[str, Any] = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise BatonError(f"The router at {url} does not answer {path}: {error}") from error
    return content


def _is_url(source: str) -> bool:
    return source.startswith(("http://", "https://"))
