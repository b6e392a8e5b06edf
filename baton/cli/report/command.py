"""The command: load, then show or write in every form that was asked for."""

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from baton.cli.report import compare, csv_rows, html, perfetto, sources
from baton.cli.report.tables import tables
from baton.cluster.errors import BatonError


@dataclass(frozen=True)
class Outputs:
    """Files to write. Without any, tables are shown."""

    html: Path | None = None
    json: Path | None = None
    csv: Path | None = None
    perfetto: Path | None = None

    @property
    def any(self) -> bool:
        return any((self.html, self.json, self.csv, self.perfetto))


def report(
    names: Sequence[str], question: sources.Question, outputs: Outputs, limit: int = 200
) -> None:
    if outputs.perfetto is not None:
        urls = [name for name in names if name.startswith("http")]
        if not urls:
            raise BatonError("--perfetto needs a router: files do not hold single requests.")
        requests = sources.requests_of(urls, limit)
        outputs.perfetto.write_text(json.dumps(perfetto.trace(requests)), encoding="utf-8")
    if outputs.any and not (outputs.html or outputs.json or outputs.csv):
        return
    found = sources.load(names, question)
    if found["kind"] != "baton-report":
        raise BatonError("A result of `baton bench` is shown beside another with --compare.")
    if outputs.html is not None:
        outputs.html.write_text(html.page(found), encoding="utf-8")
    if outputs.json is not None:
        outputs.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if outputs.csv is not None:
        with outputs.csv.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([csv_rows.HEADER, *csv_rows.rows(found)])
    if not outputs.any:
        for table in tables(found):
            Console().print(table, "")
        for sentence in found.get("missing", ()):
            Console().print(f"Missing here: {sentence}", markup=False)


def compare_two(names: Sequence[str], question: sources.Question, json_path: Path | None) -> None:
    if len(names) != 2:
        raise BatonError("--compare takes two: files or routers.")
    one, two = (sources.load([name], question) for name in names)
    if json_path is not None:
        rows: list[dict[str, Any]] = list(compare.rows(one, two))
        shown = json.dumps({"a": names[0], "b": names[1], "rows": rows}, indent=2)
        json_path.write_text(shown, encoding="utf-8")
        return
    Console().print(compare.table(one, two, (f"A: {names[0]}", f"B: {names[1]}")))
