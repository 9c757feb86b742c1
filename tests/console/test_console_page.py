"""The console in a real browser, over a live load: what it shows is what the admin API says.

With TIDEGATE_SCREENSHOTS=FOLDER it leaves pictures there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from console_load import LiveConsole, fake_console, live_console

from tidegate.admin.v1 import admin_pb2 as pb
from tidegate_client.admin import AdminClient
from tidegate_client.waterfall import waterfall

webdriver = pytest.importorskip("selenium.webdriver", reason="pip install selenium")
Keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROWS = """return [...document.querySelectorAll('.rows .row:not([hidden])')].map(row =>
  Object.fromEntries([...row.querySelectorAll('[data-field]')].map(c => [c.dataset.field, c.textContent])))"""
SEQUENCE = "return Number(document.body.dataset.sequence || 0)"


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed (Debian: apt-get install chromium chromium-driver)")
    return path


@pytest.fixture
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = tool("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1500,1500"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(tool("chromedriver")))
    driver.set_script_timeout(30)
    yield driver
    driver.quit()


class Page:
    """The page, asked from other threads, since the services run in this one."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser

    async def open(self, url: str) -> None:
        await asyncio.to_thread(self.browser.get, url)
        await self.until("return document.querySelector('#link').textContent === 'Live'")

    async def ask(self, script: str, *arguments: Any) -> Any:
        return await asyncio.to_thread(self.browser.execute_script, script, *arguments)

    async def text(self, selector: str) -> str:
        text = await self.ask("return document.querySelector(arguments[0])?.textContent ?? ''", selector)
        return str(text)

    async def press(self, selector: str, *keys: str) -> None:
        element = await asyncio.to_thread(self.browser.find_element, "css selector", selector)
        await asyncio.to_thread(element.send_keys, *keys)

    async def until(self, script: str, *arguments: Any) -> None:
        async with asyncio.timeout(60):
            while not await self.ask(script, *arguments):  # noqa: ASYNC110 - the page is elsewhere
                await asyncio.sleep(0.1)

    async def updates(self, count: int) -> None:
        """Waits for so many more updates."""
        before = await self.ask(SEQUENCE)
        await self.until("return Number(document.body.dataset.sequence) >= arguments[0]", before + count)

    async def emulate(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        command = ("Emulation.setEmulatedMedia", {"features": features})
        await asyncio.to_thread(self.browser.execute_cdp_cmd, *command)

    async def picture(self, name: str) -> None:
        folder = os.environ.get("TIDEGATE_SCREENSHOTS")
        if folder:
            await asyncio.to_thread(self.browser.save_screenshot, str(Path(folder) / name))

    def complaints(self) -> list[str]:
        """Errors, and what the content policy has blocked."""
        return [entry["message"] for entry in self.browser.get_log("browser") if entry["level"] == "SEVERE"]


@contextlib.asynccontextmanager
async def asking(live: LiveConsole) -> AsyncIterator[AdminClient]:
    with AdminClient(f"127.0.0.1:{live.service.admin_port}") as admin:
        yield admin


async def test_the_page_shows_what_the_admin_api_says(tmp_path, browser):
    page = Page(browser)
    async with live_console(tmp_path / "model") as live, asking(live) as admin:
        await page.open(live.url)
        await page.updates(8)
        await page.picture("console-live.png")
        live.hold()  # no more plans: what is live stays as it is
        await asyncio.sleep(3)
        state = await asyncio.to_thread(admin.state)
        requests = {r.request_id: r for r in await asyncio.to_thread(lambda: list(admin.requests()))}
        assert state.running_requests
        assert state.waiting_requests
        await check_figures(page, state)
        await check_rows(page, requests)
        await check_blocks(page, admin, state.workers[0].worker_id)
        await check_detail(page, admin, state)
        assert page.complaints() == []


async def check_figures(page: Page, state: pb.GetStateResponse) -> None:
    assert await page.text("[data-field=running]") == str(state.running_requests)
    assert await page.text("[data-field=waiting]") == str(state.waiting_requests)
    used = sum(worker.blocks_used for worker in state.workers)
    total = sum(worker.blocks_total for worker in state.workers)
    assert await page.text("[data-field=kv_note]") == f"{used:,} of {total:,}"
    [worker] = state.workers
    assert worker.host_blocks_total
    host_blocks = f"{worker.host_blocks_used:,} of {worker.host_blocks_total:,}"
    assert (await page.text("#workers")).endswith(host_blocks)
    assert await page.text("[data-field=preemptions]") == f"{state.counters.preemptions:,}"


async def check_rows(page: Page, requests: dict[str, pb.RequestState]) -> None:
    count = await page.ask("return document.querySelector('#requests').getAttribute('aria-rowcount')")
    assert int(count) == len(requests) + 1
    rows = await page.ask(ROWS)
    assert rows
    for row in rows:
        request = requests[row["name"]]
        status = pb.RequestStatus.Name(request.status).removeprefix("REQUEST_STATUS_").lower()
        assert row["status"] == status
        assert (row["tenant"], row["worker_id"]) == (request.tenant, request.worker_id)
        shown = [int(row[name]) for name in ("prompt_tokens", "output_tokens", "blocks", "preemptions")]
        assert shown == [request.prompt_tokens, request.output_tokens, request.blocks, request.preemptions]


async def check_blocks(page: Page, admin: AdminClient, worker_id: str) -> None:
    blocks = await asyncio.to_thread(admin.block_map, worker_id)
    holders, cached = np.frombuffer(blocks.holders, np.uint8)[1:], np.frombuffer(blocks.cached, np.uint8)[1:]
    counts = await page.ask("return {...document.querySelector('#blocks-counts').dataset}")
    assert {name: int(value) for name, value in counts.items()} == {
        "used": int((holders > 0).sum()),
        "shared": int((holders > 1).sum()),
        "cached": int(((holders == 0) & (cached > 0)).sum()),
        "free": int(((holders == 0) & (cached == 0)).sum()),
    }
    owners = np.frombuffer(blocks.owner_indices, "<i4")
    await page.press("#blocks", Keys.ARROW_RIGHT)
    for block in range(1, 12):
        told = await page.text("#blocks-reading")
        assert told.startswith(f"Block {block}: ")
        if owners[block] >= 0:
            assert blocks.owners[owners[block]].request_id in told
        await page.press("#blocks", Keys.ARROW_RIGHT)
    await page.press("#blocks", Keys.ESCAPE)


async def check_detail(page: Page, admin: AdminClient, state: pb.GetStateResponse) -> None:
    await page.press("#requests", Keys.HOME, Keys.ARROW_DOWN, Keys.ENTER)
    await page.until("return document.querySelector('#detail-body article') !== null")
    name = await page.ask("return document.querySelector('#detail-body article').dataset.request")
    (candidate,) = await asyncio.to_thread(admin.explain, name)
    phases = await page.ask(
        "return [...document.querySelectorAll('#detail-body .whole i')].map(i => i.className)"
    )
    assert phases == [phase.name for phase in waterfall(candidate).phases]
    reasons = await page.ask(
        "return [...document.querySelectorAll('#detail-body .why li')].map(li => li.textContent)"
    )
    assert reasons == [blocker.text for blocker in candidate.blockers]
    events = await page.ask(
        "return [...document.querySelectorAll('#detail-body td:nth-child(2)')].map(td => td.textContent)"
    )
    assert events == [entry.event.replace("_", " ") for entry in candidate.timeline]
    head = await page.text("#heads")
    assert "is next for" in head


async def test_a_thousand_requests_are_followed_and_both_themes_are_drawn(browser):
    page = Page(browser)
    async with fake_console(num_clients=1000) as live, asking(live) as admin:
        await page.open(live.url)
        await page.until(
            "return Number(document.querySelector('#requests').getAttribute('aria-rowcount')) > 900"
        )
        await page.updates(5)
        assert await page.ask("return document.querySelectorAll('.rows .row').length") < 40
        names = set()
        for _ in range(2):  # from the first row to the last, by keys
            names |= {row["name"] for row in await page.ask(ROWS)}
            await page.press("#requests", Keys.END)
        assert len(names) > 20
        grounds = []
        for scheme in ("light", "dark"):
            await page.emulate(scheme)
            await page.updates(2)
            await page.ask("document.querySelector('.rows .row:not([hidden])').click()")
            await page.updates(2)
            grounds.append(
                await page.ask("return getComputedStyle(document.documentElement).backgroundColor")
            )
            await page.picture(f"console-{scheme}.png")
        assert grounds[0] != grounds[1]
        state = await asyncio.to_thread(admin.state)
        assert state.running_requests + state.waiting_requests > 900  # some are between two requests
        assert page.complaints() == []
