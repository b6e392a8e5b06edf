"""A report as one HTML file that needs nothing else: styles inside, charts as SVG, no scripts."""

from collections.abc import Mapping
from datetime import UTC, datetime
from html import escape
from typing import Any

from baton.cli.report import svg
from baton.cli.report.tables import LATENCIES, number, share

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --line: #d8dde3; --soft: #5a6572;
  --c0: #2f6fde; --c1: #d9622b; --c2: #2b9a66; --c3: #9a4fd0; --c4: #b58900; --c5: #c2366b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --paper: #14171b; --line: #333a42;
  --soft: #9aa5b1; --c0: #6ea0ff; --c1: #ff9666; --c2: #5fd39b; --c3: #c58af5; --c4: #e0b83a;
  --c5: #f2729f; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1360px; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.4rem; margin: 0 0 .2rem; } h2 { font-size: 1.1rem; margin: 1.6rem 0 .4rem; }
p { color: var(--soft); margin: .2rem 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr));
  gap: 1rem; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 6px; padding: .6rem; }
figcaption { font-weight: 600; margin-bottom: .3rem; }
svg { width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
.key { margin-right: 1rem; font-size: .85rem; } .key i { display: inline-block; width: .8em;
  height: .8em; margin-right: .3em; border-radius: 2px; }
.table { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--line);
  white-space: nowrap; } th:first-child, td:first-child { text-align: left; }
"""


def page(report: Mapping[str, Any]) -> str:
    start, end = (_time(report[name]) for name in ("from", "to"))
    chosen = [f"{name} {value}" for name, value in report["filters"].items() if value]
    missing = [f"missing: {sentence}" for sentence in report.get("missing", ())]
    about = ", ".join([f"{start} to {end} UTC", *chosen, *missing])
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Baton report</title><style>{STYLE}</style></head><body>"
        f"<h1>Baton report</h1><p>{escape(about)}</p>"
        f"{_totals(report)}"
        f'<h2>Latency</h2><div class="charts">{_latency(report)}</div>'
        f'<h2>Over time</h2><div class="charts">{_over_time(report)}</div>'
        f'<h2>Causes</h2><div class="charts">{_causes(report)}</div>'
        f"<h2>Workers</h2>{_workers(report)}"
        "</body></html>\n"
    )


def _totals(report: Mapping[str, Any]) -> str:
    cells = {
        "requests": f"{report['requests']:.0f}",
        "failed": f"{report['failed']:.0f}",
        "left early": f"{report['left']:.0f}",
        "requests/s": number(report["request_throughput"]),
        "tokens/s": number(report["output_throughput"]),
        "goodput": number(report["goodput"]),
        "attainment": share(report["attainment"]),
        "prefix hits": share(report["hit_rate"]),
    }
    for name, title in LATENCIES:
        row = report[name]
        if row["count"]:
            cells[f"{title} p50 / p99"] = f"{row['p50']:,.1f} / {row['p99']:,.1f} ms"
    return _table(list(cells), [list(cells.values())])


def _latency(report: Mapping[str, Any]) -> str:
    ends = {title: report[name] for name, title in LATENCIES}
    steps = {f"batch {size}": row for size, row in report["steps"].items()}
    return "".join(
        [
            svg.ranges("Latencies", ends),
            svg.ranges("Phases that count", report["phases"]),
            svg.waterfall("Mean time to first token, by phase", report["until_first_token"]),
            svg.ranges("Decode step over batch size", steps),
        ]
    )


def _over_time(report: Mapping[str, Any]) -> str:
    series = report["series"]

    def over(name: str, key: str | None = None) -> svg.Points:
        found = [(p["at"], p[name].get(key) if key else p[name]) for p in series]
        return [(at, value) for at, value in found if value is not None]

    pools = sorted({worker for point in series for worker in point["kv_pool"]})
    used = {w: [(p["at"], p["kv_pool"][w]) for p in series if w in p["kv_pool"]] for w in pools}
    ttft = {key: over("ttft_ms", key) for key in ("p50", "p99")}
    tpot = {key: over("tpot_ms", key) for key in ("p50", "p99")}
    rates = {"served": over("request_throughput"), "goodput": over("goodput")}
    shares = {"attainment": over("attainment"), "prefix hits": over("hit_rate")}
    return "".join(
        [
            svg.lines("TTFT", ttft, " ms"),
            svg.lines("TPOT", tpot, " ms"),
            svg.lines("Requests per second", rates),
            svg.lines("Attainment and prefix hits", shares, top=1.0),
            svg.lines("KV pool in use", used, top=1.0),
        ]
    )


def _causes(report: Mapping[str, Any]) -> str:
    bandwidth = report["transfer"]["gb_s"]
    names = ("p50", "p90", "p99", "max")
    shown = {name: bandwidth[name] for name in names if name in bandwidth}
    return "".join(
        [
            svg.bars("Missed TTFT, by cause", report["misses"]["ttft"]),
            svg.bars("Missed TPOT, by cause", report["misses"]["tpot"]),
            svg.bars("KV transfer bandwidth while sending", shown, " GB/s"),
        ]
    )


def _workers(report: Mapping[str, Any]) -> str:
    head = ["worker", "role", "requests", "TTFT p50/p99 ms", "TPOT p50/p99 ms", "tokens/s"]
    rows = []
    for row in report["workers"]:
        pool = row["kv_pool"]
        rows.append(
            [
                row["worker"],
                row["role"],
                f"{row['requests']:.0f}",
                _pair(row["ttft_ms"]),
                _pair(row["tpot_ms"]),
                number(row["output_throughput"]),
                share(row["hit_rate"]),
                share(row["attainment"]),
                "" if pool is None else f"{pool['mean']:.0%} (max {pool['max']:.0%})",
            ]
        )
    return _table([*head, "prefix hits", "attainment", "KV pool"], rows)


def _pair(row: Mapping[str, float]) -> str:
    return f"{row['p50']:,.1f} / {row['p99']:,.1f}" if row["count"] else ""


def _table(head: list[str], rows: list[list[str]]) -> str:
    titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="table"><table><thead><tr>{titles}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
