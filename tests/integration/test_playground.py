"""The playground in Chromium, in front of the embedded pair: ``make browser``."""

import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ssd.rpc.client import TargetClient
from ssd.runtime.launch import Deployment, deployed

pytestmark = pytest.mark.browser
PICTURES = Path(__file__).resolve().parents[2] / "results"
DESKTOP, PHONE = {"width": 1180, "height": 900}, {"width": 390, "height": 844}
WAIT_MS = 120_000


@pytest.fixture(scope="module")
def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    assert found, "install Chromium: apt install chromium"
    return found


@asynccontextmanager
async def playground(chromium: str, **context: Any) -> AsyncIterator[tuple[Any, str]]:
    """A page in front of a running pair, and the address of its target; errors fail the test."""
    # Only this test has the package.
    from playwright.async_api import async_playwright  # noqa: PLC0415

    problems: list[str] = []
    async with deployed(Deployment(gateway_port=0)) as running, async_playwright() as library:
        assert running.gateway is not None
        base = f"http://{running.gateway.http_address}"
        browser = await library.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = await browser.new_page(**{"viewport": DESKTOP, **context})
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "console", lambda line: problems.append(line.text) if line.type == "error" else None
        )
        page.on(
            "request",
            lambda request: (
                problems.append(request.url)
                if not request.url.startswith((base, "data:"))
                else None
            ),
        )
        await page.goto(base)
        await page.wait_for_selector(".model.ready")
        yield page, running.target.grpc_address
        await browser.close()
    assert problems == []


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_both_lanes_show_the_same_text_and_every_round(chromium: str, theme: str) -> None:
    async with playground(chromium, color_scheme=theme) as (page, _):
        await page.fill("#seed", "11")
        await page.fill("#prompt", "def read_lines(path):")
        await page.keyboard.press("Control+Enter")
        await page.wait_for_selector("#verdict:not([hidden])")
        PICTURES.mkdir(exist_ok=True)
        await page.screenshot(path=PICTURES / f"playground-{theme}.png", full_page=True)
        verdict = await page.inner_text("#verdict")
        assert "identical text" in verdict
        numbers = re.search(r"(\d+) rounds instead of (\d+)", verdict)
        assert numbers is not None
        for lane, count in zip(("ssd", "ar"), numbers.groups(), strict=True):
            columns = page.locator(f"#lane-{lane} .column")
            assert await columns.count() == int(count)
        assert await page.locator("#lane-ar .cell.bonus").count() == 128
        cells = await page.locator("#lane-ssd .cell:not(.rejected)").count()
        assert cells == 128
        texts = [await page.inner_text(f"#lane-{lane} .text") for lane in ("ssd", "ar")]
        assert texts[0] == texts[1]
        assert texts[0].startswith("def read_lines(path):")
        is_slower = float(verdict.partition("×")[0]) < 1
        assert ("with “server chooses”" in verdict) == is_slower
        paper = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (max(map(int, re.findall(r"\d+", paper))) < 128) == (theme == "dark")


async def test_rounds_are_read_with_the_keyboard(chromium: str) -> None:
    async with playground(chromium) as (page, _):
        await page.uncheck("#compare")
        await page.fill("#max-tokens", "40")
        await page.keyboard.press("Control+Enter")
        await page.locator("#lane-ssd .end", has_text="Ended").wait_for()
        await page.focus("#lane-ssd .strip")
        shown = []
        for key in ("Home", "ArrowRight", "End", "ArrowLeft"):
            await page.keyboard.press(key)
            shown.append(await page.inner_text("#lane-ssd .detail p"))
        last = await page.locator("#lane-ssd .column").count()
        rounds = [int(re.findall(r"Round (\d+)", each)[0]) for each in shown]
        assert rounds == [1, 2, last, last - 1]
        assert await page.is_hidden("#lane-ar")


async def test_a_conversation_continues_and_escape_stops_an_answer(chromium: str) -> None:
    async with playground(chromium) as (page, target):
        await page.focus("#tab-completion")
        await page.keyboard.press("ArrowRight")
        assert await page.get_attribute("#tab-chat", "aria-selected") == "true"
        await page.uncheck("#compare")
        await page.fill("#max-tokens", "24")
        for number in (1, 2):
            await page.fill("#prompt", f"Question {number}")
            await page.keyboard.press("Control+Enter")
            await page.locator("#turns li").nth(2 * number - 1).wait_for()
        await page.fill("#max-tokens", "1500")
        await page.fill("#prompt", "A long answer")
        await page.keyboard.press("Control+Enter")
        await page.wait_for_selector("#lane-ssd .column:nth-child(3)")
        await page.keyboard.press("Escape")
        await page.wait_for_selector("#run:not(:disabled)")
        assert await page.inner_text("#lane-ssd .end") == "Stopped."
        async with TargetClient(target) as client:
            while (await client.pool_status()).running_sequences:
                pass


async def test_the_page_fits_a_phone(chromium: str) -> None:
    context = {"viewport": PHONE, "is_mobile": True, "has_touch": True}
    async with playground(chromium, **context) as (page, _):
        await page.tap("#run")
        await page.wait_for_selector("#verdict:not([hidden])")
        await page.screenshot(path=PICTURES / "playground-phone.png", full_page=True)
        assert await page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        heights = await page.evaluate(
            "[...document.querySelectorAll('.actions button:not([hidden])')]"
            ".map((each) => each.offsetHeight)"
        )
        assert min(heights) >= 40


async def test_a_wrong_seed_and_an_empty_prompt_have_a_message_that_replaces_the_last_one(
    chromium: str,
) -> None:
    async with playground(chromium) as (page, _):
        await page.fill("#seed", "abc")
        await page.keyboard.press("Control+Enter")
        assert "“abc” is not an integer" in await page.inner_text("#error")
        await page.fill("#prompt", "")
        await page.click("#run")
        assert await page.inner_text("#error") == "Enter a text."
        await page.fill("#seed", "")
        await page.fill("#prompt", "x = ")
        await page.click("#run")
        await page.wait_for_selector("#verdict:not([hidden])")
        assert await page.is_hidden("#error")


async def test_the_preset_needs_few_rounds(chromium: str) -> None:
    async with playground(chromium) as (page, _):
        await page.click("#preset")
        await page.wait_for_selector("#verdict:not([hidden])")
        verdict = await page.inner_text("#verdict")
        found = re.search(r"(\d+) rounds instead of (\d+)", verdict)
        assert found is not None
        assert 2 * int(found[1]) < int(found[2])
