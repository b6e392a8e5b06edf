"""The dashboard in a headless browser: it loads by itself, lives, opens requests, obeys keys."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import Page, ViewportSize, async_playwright, expect

from router.text import TextModel
from tests.support.api_keys import Keys
from tests.support.byte_model import byte_model
from tests.support.gateway import COMPLETIONS, RunningGateway, running_gateway
from tests.support.stub_workers import scripted

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
browser_needed = pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH")
DESK: ViewportSize = {"width": 1280, "height": 900}
PHONE: ViewportSize = {"width": 360, "height": 740}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return byte_model(Path(tmp_path_factory.mktemp("model")))


@pytest.fixture
async def running(model: TextModel) -> AsyncIterator[RunningGateway]:
    async with running_gateway(model, scripted("ok"), prefills=2, decodes=2) as gateway:
        gateway.cluster.decodes[0].behaviour.step_s = 0.01
        for number in range(4):
            headers = {"x-request-id": f"req-{number}", "x-baton-ttft-ms": "0.5"}
            body = {"prompt": "hi", "max_tokens": 12}
            await gateway.post(COMPLETIONS, body, headers=headers)
        yield gateway


async def test_the_page_and_its_parts_are_served_with_a_strict_policy(
    running: RunningGateway,
) -> None:
    for path, kind in (
        ("", "text/html"),
        ("/app.js", "text/javascript"),
        ("/style.css", "text/css"),
    ):
        response = await running.client.get(f"/dashboard{path}")
        assert response.status_code == 200 and response.headers["content-type"].startswith(kind)
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert "http://" not in response.text.replace("http://www.w3.org", "")
        assert "https://" not in response.text


@pytest.fixture
async def page(running: RunningGateway) -> AsyncIterator[Page]:
    """Nothing outside of the router may be asked for, and nothing may go wrong in the console."""
    wrong: list[str] = []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"]
        )
        page = await browser.new_page(viewport=DESK)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda line: wrong.append(line.text) if line.type == "error" else None)
        page.on(
            "request",
            lambda request: (
                None
                if request.url.startswith((running.url, "data:"))
                else wrong.append(request.url)
            ),
        )
        await page.goto(f"{running.url}/dashboard")
        await expect(page.locator("#state")).to_have_text("live", timeout=20_000)
        yield page
        await browser.close()
    assert wrong == []


async def save(page: Page, name: str) -> None:
    """For people: set BATON_SCREENSHOTS to a folder."""
    if folder := os.environ.get("BATON_SCREENSHOTS"):
        await page.screenshot(path=f"{folder}/{name}.png", full_page=True)


@browser_needed
@pytest.mark.slow
async def test_it_shows_workers_latencies_and_requests_and_follows_them(
    running: RunningGateway, page: Page
) -> None:
    await expect(page.locator("#workers tbody tr")).to_have_count(4)
    await expect(page.locator("#tiles")).to_contain_text("TTFT p50 / p99")
    await expect(page.locator("#charts svg")).to_have_count(4)
    await expect(page.locator("#rows details")).to_have_count(4)
    await expect(page.locator("#rows .missed").first).to_contain_text("TTFT")
    await running.post(
        COMPLETIONS, {"prompt": "x", "max_tokens": 2}, headers={"x-request-id": "new"}
    )
    await expect(page.locator("#rows details").first).to_contain_text("new", timeout=10_000)
    running.cluster.directory.remove("decode-1")
    await expect(page.locator("#workers tbody tr")).to_have_count(3, timeout=10_000)


@browser_needed
@pytest.mark.slow
async def test_a_request_opens_to_its_waterfall_by_keyboard(page: Page) -> None:
    await page.keyboard.press("Tab")
    await expect(page.locator(".skip")).to_be_focused()
    await page.keyboard.press("Enter")
    await page.keyboard.press("Tab")
    first = page.locator("#rows details").first
    await expect(first.locator("summary")).to_be_focused()
    await page.keyboard.press("Enter")
    lanes = first.locator(".lane")
    await expect(lanes.first).to_be_visible(timeout=10_000)
    await expect(first).to_contain_text("prefill-")
    await expect(first).to_contain_text("missed TTFT")
    names = await lanes.locator("span:first-child").all_inner_texts()
    assert {"receive", "admission", "reserve", "detokenise"} <= set(names)
    # It stays open and keeps the focus while the page goes on living.
    for _ in range(2):
        await page.wait_for_event("response", lambda response: "/v1/requests?" in response.url)
    await expect(lanes.first).to_be_visible()
    await expect(first.locator("summary")).to_be_focused()
    await save(page, "dashboard")


@browser_needed
@pytest.mark.slow
async def test_it_is_readable_on_a_phone(page: Page) -> None:
    await page.set_viewport_size(PHONE)
    await page.locator("#rows summary").first.click()
    await expect(page.locator(".lane").first).to_be_visible(timeout=10_000)
    wide = await page.evaluate("document.documentElement.scrollWidth")
    assert wide <= PHONE["width"], "the page scrolls sideways"
    for target in await page.locator("button, select, summary").all():
        box = await target.bounding_box()
        assert box is not None and box["height"] >= 32
    await save(page, "dashboard-phone")


@browser_needed
@pytest.mark.slow
async def test_it_pauses_and_says_when_the_router_is_gone(
    running: RunningGateway, page: Page
) -> None:
    pause = page.get_by_role("button", name="Pause")
    await pause.focus()
    await page.keyboard.press("Space")
    await expect(page.locator("#state")).to_have_text("paused")
    await page.get_by_role("button", name="Go on").click()
    await expect(page.locator("#state")).to_have_text("live")
    await page.route("**/workers", lambda route: route.fulfill(body="no JSON"))
    await expect(page.locator("#state")).to_contain_text("no answer", timeout=10_000)
    await page.unroute("**/workers")
    await expect(page.locator("#state")).to_have_text("live", timeout=10_000)


@browser_needed
@pytest.mark.slow
async def test_ids_are_text_and_nothing_else(running: RunningGateway, page: Page) -> None:
    headers = {"x-request-id": "<img/src=x/onerror=alert(1)>"}
    await running.post(COMPLETIONS, {"prompt": "x", "max_tokens": 2}, headers=headers)
    first = page.locator("#rows details").first
    await expect(first).to_contain_text("<img/src=x", timeout=10_000)
    assert await page.locator("#rows img").count() == 0


@browser_needed
@pytest.mark.slow
async def test_where_keys_are_in_force_it_asks_for_one_and_lives(
    model: TextModel, tmp_path: Path
) -> None:
    keys = Keys(tmp_path / "keys.toml", root={"admin": True})
    async with (
        running_gateway(model, scripted("ok"), api_keys_file=keys.path) as gateway,
        async_playwright() as playwright,
    ):
        browser = await playwright.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"]
        )
        page = await browser.new_page(viewport=DESK)
        page.on("dialog", lambda dialog: asyncio.ensure_future(dialog.accept(keys.secrets["root"])))
        await page.goto(f"{gateway.url}/dashboard")
        await expect(page.locator("#state")).to_have_text("live", timeout=20_000)
        await expect(page.locator("#workers tbody tr")).to_have_count(2)
        await browser.close()
