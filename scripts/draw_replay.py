#!/usr/bin/env python3
"""Draws docs/replay.svg: the requests of agents' sessions that are answered, by the table of docs/comparing.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
PICTURE, PAGE = DOCS / "replay.svg", DOCS / "comparing.md"

ROW = re.compile(r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+) \| [\d.]+ \| [\d.]+ \|$", re.MULTILINE)
"""Users, requests, and those that our server and the unpatched one answered."""

WIDTH, LEFT, FULL = 720, 92, 460
"""Pixels: of the picture, before the bars, and of a bar of all requests."""

TOP, GROUP, BAR = 52, 68, 24

LIGHT = {"page": "#ffffff", "ours": "#0969da", "unpatched": "#afb8c1", "ink": "#1f2328"}
DARK = {"page": "#0d1117", "ours": "#4493f8", "unpatched": "#59636e", "ink": "#f0f6fc"}


def rows() -> list[tuple[int, ...]]:
    """Return users, requests, answered by ours and answered by the unpatched server, a row of the table each."""
    return [tuple(map(int, row)) for row in ROW.findall(PAGE.read_text(encoding="utf-8"))]


def render() -> str:
    """Return the picture. It has its own background, and the colours of the reader's light or dark theme."""
    found = rows()
    height = TOP + GROUP * len(found)
    parts = (*_head(found, height), *(line for at, row in enumerate(found) for line in _group(at, row)), "</svg>")
    return "\n".join(parts) + "\n"


def _head(found: list[tuple[int, ...]], height: int) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" font-family="DejaVu Sans, Verdana, sans-serif" font-size="13">'
    )
    yield "<title>Requests answered of all, by users at once</title>"
    told = (f"{users} at once: ours {ours} of {all_}, unpatched {stock}." for users, all_, ours, stock in found)
    yield f"<desc>{' '.join(told)}</desc>"
    yield f"<style>{_colours(LIGHT)}@media (prefers-color-scheme: dark) {{{_colours(DARK)}}}</style>"
    yield f'<rect class="page" width="{WIDTH}" height="{height}"/>'
    for at, name in ((LEFT, "ours"), (LEFT + 110, "unpatched")):
        yield f'<rect class="{name}" x="{at}" y="16" width="16" height="16"/><text x="{at + 24}" y="29">{name}</text>'


def _group(at: int, row: tuple[int, ...]) -> Iterator[str]:
    users, requests, *answered = row
    top = TOP + GROUP * at
    yield f'<text x="{LEFT - 12}" y="{top + BAR + 5}" text-anchor="end">{users} user{"s" * (users > 1)}</text>'
    for number, (name, count) in enumerate(zip(("ours", "unpatched"), answered, strict=True)):
        y, width = top + BAR * number, round(FULL * count / requests)
        yield f'<rect class="{name}" x="{LEFT}" y="{y}" width="{width}" height="{BAR - 2}"/>'
        yield f'<text x="{LEFT + width + 8}" y="{y + 16}">{count} of {requests} requests</text>'


def _colours(of: dict[str, str]) -> str:
    boxes = "".join(f".{name}{{fill:{of[name]}}}" for name in ("page", "ours", "unpatched"))
    return f"{boxes}text{{fill:{of['ink']}}}"


if __name__ == "__main__":
    PICTURE.write_text(render(), encoding="utf-8")
