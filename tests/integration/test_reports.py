"""`GET /v1/reports` and `baton report`, over scripted workers."""

import asyncio
import csv
import json
import threading
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from baton.cli.report.command import Outputs, compare_two, report
from baton.cli.report.sources import Question, load
from baton.cluster.errors import BatonError
from baton.cluster.reports import Filters
from router import reports_api
from router.text import TextModel
from tests.support.byte_model import byte_model
from tests.support.gateway import COMPLETIONS, RunningGateway, running_gateway
from tests.support.stub_workers import scripted

ALL = Question(3600, Filters())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return byte_model(Path(tmp_path_factory.mktemp("model")))


@pytest.fixture
async def running(model: TextModel) -> AsyncIterator[RunningGateway]:
    async with running_gateway(model, scripted("ok"), prefills=2, decodes=2) as gateway:
        for number in range(6):
            await gateway.post(COMPLETIONS, {"prompt": f"hi {number}", "max_tokens": 4})
        yield gateway


async def reported(running: RunningGateway, **query: Any) -> Any:
    return (await running.client.get("/v1/reports", params=query)).json()


async def test_a_report_counts_what_was_served(running: RunningGateway) -> None:
    found = await reported(running)
    assert found["requests"] == 6 and found["output_tokens"] == 24
    assert found["ttft_ms"]["count"] == 6 and found["e2e_ms"]["p99"] > 0
    assert {"prefill", "decode"} == {row["role"] for row in found["workers"]}
    assert "admission" in found["phases"] and found["series"]


async def test_tokens_flow_while_a_report_is_being_made(
    running: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report is not ready before the stream has ended."""
    begun, streamed, build = asyncio.Event(), threading.Event(), reports_api.build_report
    loop, waited = asyncio.get_running_loop(), []

    def slowly(*arguments: Any) -> Any:
        loop.call_soon_threadsafe(begun.set)
        waited.append(streamed.wait(timeout=30))
        return build(*arguments)

    monkeypatch.setattr(reports_api, "build_report", slowly)
    asked = asyncio.create_task(reported(running))
    await begun.wait()
    events = await running.events(COMPLETIONS, {"prompt": "x", "max_tokens": 20})
    streamed.set()
    assert events[-1] == "[DONE]" and (await asked)["requests"] == 6
    assert waited == [True], "the stream ended only after the report"


async def test_filters_and_window_narrow_it(running: RunningGateway) -> None:
    rows = [row for row in (await reported(running))["workers"] if row["role"] == "decode"]
    for row in rows:
        assert (await reported(running, worker=row["worker"]))["requests"] == row["requests"]
    assert (await reported(running, model="another"))["requests"] == 0
    wrong = await running.client.get("/v1/reports?window=0")
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "window"


async def test_routers_merge(running: RunningGateway, model: TextModel) -> None:
    async with running_gateway(model, scripted("ok")) as second:
        await second.post(COMPLETIONS, {"prompt": "x", "max_tokens": 2})
        both = await asyncio.to_thread(load, [running.url, second.url], ALL)
    assert both["requests"] == 7 and both["output_tokens"] == 26
    assert both["ttft_ms"]["count"] == 7


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.charts: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.outside += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href")]
        if tag in ("script", "link", "iframe"):
            self.outside.append(tag)
        if tag == "svg":
            self.charts.append(given["aria-label"] or "")
        if tag not in ("meta", "circle", "rect", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("circle", "rect", "path"):
            assert self.open.pop() == tag


async def test_the_page_needs_nothing_but_itself(running: RunningGateway, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    await asyncio.to_thread(report, [running.url], ALL, Outputs(html=path))
    text = path.read_text()
    page = _Page()
    page.feed(text)
    assert page.open == [] and page.outside == [] and "url(" not in text
    assert any("first token, by phase" in title for title in page.charts)
    assert any("Phases that count" in title for title in page.charts)
    assert "nan" not in text.lower().replace("nanum", "")


async def test_json_can_be_read_again_and_csv_is_flat(
    running: RunningGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, flat = tmp_path / "r.json", tmp_path / "r.csv"
    await asyncio.to_thread(report, [running.url], ALL, Outputs(json=saved, csv=flat))
    report([str(saved)], ALL, Outputs())
    shown = capsys.readouterr().out
    assert "TTFT" in shown and "prefill-0" in shown and "admission" in shown
    rows = list(csv.DictReader(flat.read_text().splitlines()))
    assert [
        row["value"] for row in rows if row["figure"] == "requests" and row["section"] == "total"
    ] == ["6.0"]
    assert {"total", "latency", "phases", "worker", "series"} <= {row["section"] for row in rows}


async def test_a_trace_holds_every_request_and_phase(
    running: RunningGateway, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    await asyncio.to_thread(report, [running.url], ALL, Outputs(perfetto=path))
    events = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["tid"] for event in spans} == set(range(1, 7))
    assert all(event["dur"] >= 0 and event["ts"] > 1e15 for event in spans)
    named = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert "router" in named


async def test_two_reports_are_laid_side_by_side(
    running: RunningGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "a.json", tmp_path / "b.json"
    await asyncio.to_thread(report, [running.url], ALL, Outputs(json=one))
    for _ in range(6):
        await running.post(COMPLETIONS, {"prompt": "x", "max_tokens": 4})
    await asyncio.to_thread(report, [running.url], ALL, Outputs(json=two))
    compare_two([str(one), str(two)], ALL, tmp_path / "c.json")
    rows = {row["figure"]: row for row in json.loads((tmp_path / "c.json").read_text())["rows"]}
    assert rows["requests"]["ratio"] == 2.0 and "TTFT p50 (ms)" in rows
    compare_two([str(one), str(two)], ALL, None)
    assert "2.00×" in capsys.readouterr().out


def test_what_is_no_report_is_said_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("[]")
    for sources in ([str(path)], [str(tmp_path / "none.json")], ["http://127.0.0.1:9"]):
        with pytest.raises(BatonError):
            report(sources, ALL, Outputs())
    with pytest.raises(BatonError, match="takes two"):
        compare_two([str(path)], ALL, None)
    with pytest.raises(BatonError, match="--perfetto needs a router"):
        report([str(path)], ALL, Outputs(perfetto=path))
