"""The page in a real browser: chromium of the system, driven by playwright; skipped where either is missing."""

from __future__ import annotations

import base64
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "tests"))
from support.documents import pdf  # noqa: E402
from support.fake_hub import Hub, serving  # noqa: E402
from support.serving import serve  # noqa: E402
from support.vision import SIDE, png, write_projector  # noqa: E402

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MODEL = REPO / "tests/models/recall-qwen3-q8_0.gguf"
CODE = "4820917"
FACT = f"The access code for silver harbor is {CODE}."
QUESTION = "What is the access code for silver harbor?"
AXE = REPO / ".venv-clients/node/node_modules/axe-core/axe.min.js"
SHOTS = os.environ.get("KVFLASH_TEST_SCREENSHOTS")

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip

HOSTILE = """Look: <script>window.hurt = 1</script> <img src=x onerror="window.hurt = 2"> ![i](x:y)
[go](javascript:window.hurt=3) [out](https://example.org)

| a | b |
| - | - |
| 1 | <svg onload="window.hurt = 4"> |

```python
print("</code></pre><script>window.hurt = 5</script>")
```
"""


class Driven:
    """A page, with what its console said."""

    def __init__(self, page: Any) -> None:
        self.page, self.errors = page, list[str]()
        page.on("console", lambda said: self.errors.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def until(self, condition: str) -> None:
        """Not by wait_for_function, which evaluates text: the page's policy forbids that."""
        for _ in range(6000):  # others may use the same cores
            if self.page.evaluate(condition):
                return
            time.sleep(0.1)
        raise AssertionError(condition)

    def open(self, port: int) -> None:
        self.page.goto(f"http://127.0.0.1:{port}/")
        self.until("document.getElementById('status').textContent.startsWith('idle')")

    def press(self, wanted: str, key: str = "Enter") -> None:
        """Go to a control by Tab alone, and press a key there."""
        for _ in range(60):
            if self.page.evaluate(f"document.activeElement.matches({wanted!r})"):
                assert self.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
                self.page.keyboard.press(key)
                return
            self.page.keyboard.press("Tab")
        raise AssertionError(f"Tab does not lead to {wanted}")

    def set(self, **values: str) -> None:
        """Fill in settings, which are folded away at first."""
        self.page.evaluate("document.getElementById('settings').open = true")
        for name, value in values.items():
            self.page.fill(f"#{name}", value)

    def ask(self, text: str) -> None:
        self.page.focus("#input")
        self.page.keyboard.type(text)
        self.page.keyboard.press("Enter")

    def shot(self, name: str) -> None:
        if SHOTS is not None:
            self.page.screenshot(path=f"{SHOTS}/{name}.png", full_page=True)

    def sound(self) -> None:
        """Nothing that axe-core finds, where it is."""
        if AXE.exists():
            self.page.evaluate(AXE.read_text(encoding="utf-8"))
            found = self.page.evaluate("axe.run()")["violations"]
            assert [(one["id"], [node["html"][:120] for node in one["nodes"]]) for one in found] == []

    def fits(self, width: int) -> None:
        assert self.page.evaluate("document.documentElement.scrollWidth") <= width


@contextmanager
def browsing(profile: Path, scheme: str, width: int) -> Iterator[Driven]:
    playwright = pytest.importorskip("playwright.sync_api")
    if BROWSER is None:
        pytest.skip("there is no chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch_persistent_context(
            str(profile), executable_path=BROWSER, args=FLAGS, color_scheme=scheme, headless=True,
            viewport={"width": width, "height": 800},
        )  # fmt: skip
        driven = Driven(browser.new_page())
        try:
            yield driven
        finally:
            browser.close()
        assert driven.errors == []


ANSWER = "(document.querySelectorAll('.message.assistant')[{}]?.innerText ?? '')"


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_a_document_and_the_next_day(scheme: str, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model comes from a hub. A file of 100 KB is dropped in and asked about; the next server goes on with it."""
    pytest.importorskip("huggingface_hub", reason="needs the extra hub")
    text = (REPO / "tests/text/licences.txt").read_text(encoding="utf-8")
    while len(text) < 100_000:
        text += text
    file = tmp_path / "licences.txt"
    file.write_text(f"{text[:30_000]}\n{FACT}\n{text[30_000:100_000]}\n", encoding="utf-8")
    # read with a pool: on a slow machine the whole of it would take minutes
    reading = ("--kvflash", "2048", "--kvflash-reading", "pool")
    options = ("-hf", Hub.repo, *reading, "-c", "65536", "-q", "--session-dir", str(tmp_path / "sessions"))
    hub = Hub(files={"model-Q8_0.gguf": MODEL.read_bytes()})
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with serving(hub), browsing(tmp_path / "profile", scheme, width) as driven:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        page, until = driven.page, driven.until
        with serve(None, *options) as served:
            port = served.port
            driven.open(port)
            page.focus("#fresh")
            driven.press("#settings > summary")
            driven.set(temperature="0", most="40")
            driven.shot(f"{width}-1-empty")
            page.set_input_files("#picker", str(file))
            until("document.getElementById('files').textContent.includes('tokens Remove')")
            driven.ask(QUESTION)
            until("!document.getElementById('reading').hidden && $('left').textContent.includes('left')")
            assert 0 < page.evaluate("document.getElementById('bar').value / document.getElementById('bar').max") < 1
            driven.shot(f"{width}-2-reading")
            until(ANSWER.format(0) + ".includes('tokens a second')")
            assert CODE in page.evaluate(ANSWER.format(0))
            until("map.why.size > 0 && mine")
            assert page.evaluate("document.getElementById('reading').hidden")
            shown = page.evaluate("document.getElementById('pool').textContent")
            here, _, chunks = shown.partition(" chunks are on the device")[0].partition(" of ")
            assert 0 < int(here) <= 32 < int(chunks)
            page.focus("#map")
            page.keyboard.press("End")
            until("/: on the device. .*“.{100}/.test(document.getElementById('why').textContent)")
            driven.fits(width)
            driven.shot(f"{width}-3-answered")
            until("chat.kept !== null && localStorage.getItem(STORE + chat.name).includes(chat.kept)")
            assert served.stop() == 0
        page.close()
        driven.errors.clear()  # the page had lost its server
        with serve(None, *options, "--port", str(port)) as served:
            driven = Driven(page.context.new_page())
            page, until = driven.page, driven.until
            driven.open(port)
            assert page.evaluate("chat.messages.length") == 0, "a new tab has a new conversation"
            driven.press("#past > summary")
            until("document.getElementById('list').textContent.includes('in a file')")
            driven.shot(f"{width}-4-list")
            driven.press("#list button")
            until("document.querySelectorAll('.message').length === 2")
            driven.set(temperature="0", most="40")
            driven.ask(QUESTION)
            until(ANSWER.format(1) + ".includes('tokens a second')")
            known = page.evaluate("chat.messages[3].meta")
            total, cached = (
                int(found.replace(",", "")) for found in re.findall(r"([\d,]+) (?:tokens,|of them known)", known)
            )
            assert total - cached < 128, "the document is not read again"
            assert CODE in page.evaluate(ANSWER.format(1))
            driven.shot(f"{width}-5-next-day")
            driven.fits(width)
            assert driven.errors == []
        assert [name for name, _ in hub.fetched()] == ["model-Q8_0.gguf"], "it was fetched once"


@pytest.mark.parametrize(("scheme", "width"), [("light", 390)])
def test_a_server_of_several_models(scheme: str, width: int, tmp_path: Path) -> None:
    """Two answers in one conversation, each by the model that was chosen for it."""
    folder = tmp_path / "models"
    folder.mkdir()
    for name in ("one", "other"):
        (folder / f"{name}.gguf").symlink_to(MODEL)
    options = ("--models-dir", str(folder), "--kvflash", "1024", "-c", "4096", "-q")
    with serve(None, *options) as served, browsing(tmp_path / "profile", scheme, width) as driven:
        page, until = driven.page, driven.until
        page.goto(f"http://127.0.0.1:{served.port}/")
        until("document.getElementById('status').textContent.includes('is loaded')")
        until("!document.getElementById('several').hidden")
        driven.set(most="4", temperature="0")
        for count, name in enumerate(("other", "one"), 1):
            page.select_option("#which", name)
            driven.ask(QUESTION)
            until(f"running === null && chat.messages.length === {2 * count}")
            until(f"document.getElementById('model').textContent === '{name}'")
        driven.shot(f"{width}-7-models")
        driven.fits(width)
        driven.errors.clear()  # it had asked before a model was loaded


@pytest.mark.parametrize(("scheme", "width"), [("dark", 1280), ("light", 390)])
def test_answers_by_keyboard(scheme: str, width: int, tmp_path: Path) -> None:
    """Cut-off marks, Escape, a reload, and Markdown of an answer that wants to run."""
    options = ("--kvflash", "1024", "-c", "16384", "-q")
    with serve(MODEL, *options) as served, browsing(tmp_path / "profile", scheme, width) as driven:
        page, until = driven.page, driven.until
        driven.open(served.port)
        driven.set(most="5", system="Answer in numbers.")
        page.focus("#input")
        page.keyboard.type("one")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("two")
        page.keyboard.press("Enter")
        until("running === null && chat.messages.length === 2")
        assert page.evaluate("chat.messages[0].content") == "one\ntwo"
        assert "Stopped at the limit: 5 tokens" in page.evaluate(ANSWER.format(0))
        driven.set(most="8000", temperature="2")
        long = (REPO / "tests/text/licences.txt").read_text(encoding="utf-8")[:30_000]
        page.fill("#input", f"{long}\nTell me more.")  # which takes seconds to read
        page.focus("#input")
        page.keyboard.press("Enter")
        until("running !== null && chat.messages.length === 4")
        page.keyboard.press("Escape")
        until("running === null")
        assert "Cancelled." in page.evaluate(ANSWER.format(1))
        driven.press("#again")
        until("running !== null")
        page.reload()
        until("document.querySelectorAll('.message').length === 4")
        assert "Cut off: the page was closed." in page.evaluate(ANSWER.format(1))
        assert page.input_value("#system") == "Answer in numbers."
        said = "(text) => { chat.messages[3] = { role: 'assistant', content: text, meta: '', cut: '' }; draw(); }"
        page.evaluate(said, HOSTILE)
        until("document.querySelectorAll('.message table, .message pre').length === 2")
        assert page.evaluate("document.querySelectorAll('#log script, #log img, #log svg').length") == 0
        links = page.evaluate("[...document.querySelectorAll('#log a')].map((a) => [a.href, a.rel, a.target])")
        assert links == [["https://example.org/", "noopener noreferrer", "_blank"]]
        driven.shot(f"{width}-6-markdown")
        spoiled = '<img src=x onerror="window.hurt = 6"><a href="javascript:hurt=7">x</a>'
        page.evaluate("(html) => put(document.querySelector('.said'), html)", spoiled)
        time.sleep(0.3)
        assert page.evaluate("window.hurt") is None, "the policy forbids what the sanitiser would let through"
        driven.errors.clear()  # the browser tells what the policy has blocked
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.evaluate("draw()")
        until("document.querySelector('pre + button') !== null")
        page.focus("#log")
        driven.press("pre + button")
        until("document.querySelector('pre + button').textContent === 'Copied'")
        assert "print(" in page.evaluate("navigator.clipboard.readText()")
        driven.fits(width)


def chosen(page: Any, control: str) -> Path:
    """The file that a control has the browser save."""
    with page.expect_download() as saved:
        page.click(control)
    return Path(saved.value.path())


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_versions_names_and_files(scheme: str, width: int, tmp_path: Path) -> None:
    """An edited message and another answer are versions; a conversation leaves as a file, and comes back."""
    options = ("--kvflash", "1024", "-c", "8192", "-q", "--mmproj", str(tmp_path / "mmproj.gguf"))
    write_projector(tmp_path / "mmproj.gguf", 256)
    (tmp_path / "code.pdf").write_bytes(pdf(FACT))
    (tmp_path / "red.png").write_bytes(base64.b64decode(png((250, 20, 20)).partition(",")[2]))
    with serve(MODEL, *options) as served, browsing(tmp_path / "profile", scheme, width) as driven:
        page, until = driven.page, driven.until
        asked: list[Any] = []
        page.on("request", lambda one: asked.append(one.post_data_json) if "completions" in one.url else None)

        def answered(count: int) -> None:
            until(
                f"running === null && chat.messages.length === {count} && chat.messages[{count - 1}].cut !== 'running'"
            )

        driven.open(served.port)
        until("document.getElementById('top_k').placeholder === '40' && sees")
        driven.set(most="5", temperature="0.5", min_p="0.1", seed="7")
        driven.ask("First question")
        answered(2)
        assert {name: asked[-1][name] for name in ("temperature", "min_p", "seed", "max_tokens")} == {
            "temperature": 0.5, "min_p": 0.1, "seed": 7, "max_tokens": 5,
        }  # fmt: skip
        assert "top_k" not in asked[-1]
        page.click(".message.user button:text('Edit')")
        assert page.is_visible("#editing")
        page.fill("#input", "Second question")
        page.focus("#input")
        page.keyboard.press("Enter")
        answered(2)
        assert page.is_hidden("#editing")
        assert "2 of 2" in page.inner_text(".message.user")
        assert len(asked[-1]["messages"]) == 1, "the earlier version is not sent"
        page.click("#again")
        until("chat.messages[1].others?.length === 2")
        answered(2)
        driven.shot(f"{width}-8-versions")
        page.click(".message.user button[aria-label='Version before']")
        assert "First question" in page.inner_text(".message.user")
        assert page.evaluate("chat.messages[1].others") is None
        page.click(".message.user button[aria-label='Next version']")
        assert "Second question" in page.inner_text(".message.user")
        assert "2 of 2" in page.inner_text(".message.assistant")
        page.set_input_files("#picker", [str(tmp_path / "code.pdf"), str(tmp_path / "red.png")])
        until("/code.pdf: \\d+ tokens/.test($('files').textContent) && $('files').textContent.includes('red.png: ')")
        driven.ask(QUESTION)
        answered(4)
        image, text = asked[-1]["messages"][-1]["content"]
        assert image["image_url"]["url"].startswith("data:image/png;base64,")
        assert text["text"].startswith(f"code.pdf:\n{FACT}\n")
        assert page.evaluate("document.querySelector('.message img').naturalWidth") == SIDE
        driven.shot(f"{width}-9-files")
        page.click("#past > summary")
        page.click("#list button:text('Rename')")
        page.keyboard.type("Harbour talk")
        page.keyboard.press("Enter")
        until("$('list').textContent.includes('Harbour talk')")
        saved = [chosen(page, f"#list button:text('{kind}')") for kind in ("Markdown", "JSON")]
        assert "**You**\n\ncode.pdf:\n" in saved[0].read_text(encoding="utf-8")
        for number, suffix in enumerate((".md", ".json")):
            shutil.copy(saved[number], tmp_path / f"saved{suffix}")
            before = page.evaluate("chat.name")
            page.set_input_files("#bringer", str(tmp_path / f"saved{suffix}"))
            until(f"chat.name !== '{before}' && chat.messages.length === 4")
            assert page.evaluate("title(chat)") == "Harbour talk"
            assert page.evaluate("chat.messages[0].content") == "Second question"
        assert page.evaluate("chat.messages[0].others.length") == 2, "JSON has the versions"
        assert page.evaluate("chat.messages[2].files[1].image").startswith("data:image/png")
        (tmp_path / "bad.json").write_text('{"messages": 7}', encoding="utf-8")
        page.click("#past > summary")
        page.set_input_files("#bringer", str(tmp_path / "bad.json"))
        until("$('others').textContent === 'bad.json is no conversation: it has no list of messages'")
        page.fill("#find", "nowhere")
        until("$('list').children.length === 0")
        page.fill("#find", "harbour")
        until("$('list').children.length === 3")
        driven.shot(f"{width}-10-list")
        driven.fits(width)
        driven.sound()
        page.reload()
        driven.set()
        assert [page.input_value(f"#{name}") for name in ("temperature", "min_p", "most")] == ["0.5", "0.1", "5"]
        driven.sound()
