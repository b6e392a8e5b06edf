"""Requests as a trace for ui.perfetto.dev: a process per router or worker, a track per request.

The format is Chrome's JSON trace events (complete events, microseconds).
"""

from collections.abc import Iterable, Mapping
from typing import Any


def trace(requests: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    requests = sorted(requests, key=lambda request: request["started_at"])
    places = dict.fromkeys(p["where"] for r in requests for p in r["timing"]["phases"])
    pids = {where: number for number, where in enumerate(places, start=1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": where}}
        for where, pid in pids.items()
    ]
    for number, request in enumerate(requests, start=1):
        events += _named(number, request, pids.values())
        events += _phases(number, request, pids)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(number: int, request: Mapping[str, Any], pids: Iterable[int]) -> list[dict[str, Any]]:
    args = {"name": request["id"]}
    return [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": number, "args": args} for pid in pids
    ]


def _phases(
    number: int, request: Mapping[str, Any], pids: Mapping[str, int]
) -> list[dict[str, Any]]:
    start = request["started_at"] * 1e6
    fixed = ("name", "where", "start_ms", "duration_ms")
    return [
        {
            "ph": "X",
            "name": phase["name"],
            "cat": "overlapped" if phase["overlapped"] else "counted",
            "pid": pids[phase["where"]],
            "tid": number,
            "ts": start + phase["start_ms"] * 1e3,
            "dur": phase["duration_ms"] * 1e3,
            "args": {name: value for name, value in phase.items() if name not in fixed},
        }
        for phase in request["timing"]["phases"]
    ]
