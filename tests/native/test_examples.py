"""The examples of README and docs/, run as they stand beside a small model and a text longer than their pools."""

from __future__ import annotations

import base64
import re
import shutil
from pathlib import Path

import pytest
from support.harness import MODELS, TEXT
from support.sounds import wav
from support.vision import png, write_projector

pytestmark = pytest.mark.usefixtures("known_heads")

REPO = Path(__file__).parents[2]
PAGES = ("README.md", "docs/examples.md", "docs/snapshots.md", "docs/prefix-cache.md", "docs/images.md")
ELSEWHERE = "langchain"
"""What tests/clients runs."""


def examples() -> list[object]:
    found = []
    for page in PAGES:
        text = (REPO / page).read_text(encoding="utf-8")
        for number, block in enumerate(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)):
            if ELSEWHERE not in block:
                found.append(pytest.param(block, id=f"{page} {number}"))
    return found


@pytest.mark.parametrize("example", examples())
def test_an_example_runs(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(MODELS / "recall-qwen3-q8_0.gguf", tmp_path / "model.gguf")
    (tmp_path / "book.txt").write_bytes(TEXT.read_bytes()[:16_000])  # some 5,000 tokens
    if "mmproj.gguf" in example:
        write_projector(tmp_path / "mmproj.gguf", 256, hears=True)
        (tmp_path / "speech.wav").write_bytes(wav(50))
        (tmp_path / "photo.png").write_bytes(base64.b64decode(png((250, 20, 20)).partition(",")[2]))
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(example, "an example", "exec"), names)
    for name, value in names.items():
        if name == "llm":
            value.close()  # type: ignore[attr-defined]
