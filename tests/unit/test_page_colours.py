"""Text of the page can be read: WCAG 2 wants a contrast of 4.5 (1.4.3)."""

from __future__ import annotations

import re
from importlib import resources

import pytest

CSS = resources.files("kvflash_ggml.server").joinpath("page.css").read_text(encoding="utf-8")
MODES = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block)) for block in re.findall(r":root {([^}]*)}", CSS)]
GROUNDS = ("bg", "card", "user")
PAIRS = [(text, ground) for text in ("ink", "soft", "accent", "bad") for ground in GROUNDS] + [("on-accent", "accent")]


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("mode", MODES, ids=["light", "dark"])
@pytest.mark.parametrize(("text", "ground"), PAIRS)
def test_text_has_contrast(mode: dict[str, str], text: str, ground: str) -> None:
    dark, bright = sorted(map(luminance, (mode[text], mode[ground])))
    assert (bright + 0.05) / (dark + 0.05) >= 4.5
