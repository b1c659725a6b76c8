"""The page in a real browser: chromium of the system, driven by playwright; skipped where either is missing."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "tests"))
from support.serving import Served, serve  # noqa: E402

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MODEL = REPO / "tests/models/recall-qwen3-q8_0.gguf"
CODE = "4820917"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    if BROWSER is None:
        pytest.skip("there is no chromium")
    with serve(MODEL, "--kvflash", "1024", "-c", "16384", "-q") as server:
        yield server


def until(page: Any, condition: str) -> None:
    """Not by wait_for_function, which evaluates text: the page's policy forbids that."""
    for _ in range(600):
        if page.evaluate(condition):
            return
        time.sleep(0.1)
    raise AssertionError(condition)


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 320)])
def test_a_chat_by_keyboard(scheme: str, width: int, served: Served) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    text = (REPO / "tests/text/licences.txt").read_text(encoding="utf-8")
    fact = f"The access code for silver harbor is {CODE}."
    document = f"{text[:6000]}\n{fact}\n{text[6000:16000]}\nWhat is the access code for silver harbor?"
    errors: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800}).new_page()
        page.on("console", lambda said: errors.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"http://127.0.0.1:{served.port}/")
        until(page, "document.getElementById('status').textContent === 'idle'")
        page.fill("#temperature", "0")
        page.fill("#input", document)
        page.keyboard.press("Enter")
        until(page, "document.querySelector('.message.assistant .meta')?.textContent.includes('tok/s')")
        assert CODE in page.inner_text(".message.assistant p")
        until(page, "map.why.size > 0 && mine")
        page.focus("#map")
        page.keyboard.press("End")
        until(page, "document.getElementById('why').textContent.includes('What is the access code')")
        reasons = page.evaluate("[...map.why.values()].filter((why) => why !== null).length")
        assert reasons > 0, "no chunk has a reason"
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("Boolean(getComputedStyle(document.body).backgroundColor)")
        page.fill("#most", "4000")
        page.fill("#temperature", "2")
        page.fill("#input", "Tell me more.")
        page.keyboard.press("Enter")
        until(page, "document.querySelectorAll('.message.assistant p')[1]?.textContent.length > 5")
        page.evaluate("document.getElementById('stop').click()")
        until(page, "running === null")
        many = """() => {
            map = { chunks: 2048, length: 131072, bits: new Uint8Array(256).fill(0x55), why: new Map() };
            const begun = performance.now();
            for (let i = 0; i < 20; i++) paint();
            return (performance.now() - begun) / 20;
        }"""
        assert page.evaluate(many) < 16
        browser.close()
    assert errors == []
