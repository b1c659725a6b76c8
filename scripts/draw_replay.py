#!/usr/bin/env python3
"""Draws docs/replay.svg: how many requests of agents' sessions are answered, and how soon, by the table of
docs/comparing.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parents[1] / "docs"
PICTURE, PAGE = DOCS / "replay.svg", DOCS / "comparing.md"

ROW = re.compile(r"^\| (\d+) \| (\d+) \| (\d+) \| ([\d.]+|-) \| ([\d.]+|-)(?: \| (?:[\d.]+|-)){4} \|$", re.MULTILINE)

WIDTH, LEFT, FULL = 720, 92, 440
"""Pixels: of the picture, before the bars, and of the longest bar."""

TOP, GROUP, BAR = 52, 68, 24

LIGHT = {"page": "#ffffff", "ours": "#0969da", "unpatched": "#afb8c1", "ink": "#1f2328"}
DARK = {"page": "#0d1117", "ours": "#4493f8", "unpatched": "#59636e", "ink": "#f0f6fc"}


class Row(NamedTuple):
    """Requests that our server and the unpatched one answered, and the seconds to the first token, "-" for unknown."""

    users: int
    answered: tuple[int, int]
    seconds: tuple[str, str]


def rows() -> list[Row]:
    """Return a row of the table each."""
    found = ROW.findall(PAGE.read_text(encoding="utf-8"))
    return [Row(int(users), (int(ours), int(stock)), (soon, late)) for users, ours, stock, soon, late in found]


def words(count: int, seconds: str) -> str:
    """Return what stands beside a bar."""
    said = f"{count} request{'s' * (count != 1)}"
    return said if seconds == "-" else f"{said}, {seconds} s"


def render() -> str:
    """Return the picture. It has its own background, and the colours of the reader's light or dark theme."""
    found = rows()
    height = TOP + GROUP * len(found)
    most = max(max(row.answered) for row in found)
    groups = (line for at, row in enumerate(found) for line in _group(at, row, most))
    parts = (*_head(found, height), *groups, "</svg>")
    return "\n".join(parts) + "\n"


def _head(found: list[Row], height: int) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" font-family="DejaVu Sans, Verdana, sans-serif" font-size="13">'
    )
    yield "<title>Requests answered, and the 95th percentile of the time to the first token, by users at once</title>"
    told = (
        f"{row.users} at once: ours {words(row.answered[0], row.seconds[0])}; "
        f"unpatched {words(row.answered[1], row.seconds[1])}."
        for row in found
    )
    yield f"<desc>{' '.join(told)}</desc>"
    yield f"<style>{_colours(LIGHT)}@media (prefers-color-scheme: dark) {{{_colours(DARK)}}}</style>"
    yield f'<rect class="page" width="{WIDTH}" height="{height}"/>'
    for at, name in ((LEFT, "ours"), (LEFT + 110, "unpatched")):
        yield f'<rect class="{name}" x="{at}" y="16" width="16" height="16"/><text x="{at + 24}" y="29">{name}</text>'


def _group(at: int, row: Row, most: int) -> Iterator[str]:
    top = TOP + GROUP * at
    label = f"{row.users} user{'s' * (row.users > 1)}"
    yield f'<text x="{LEFT - 12}" y="{top + BAR + 5}" text-anchor="end">{label}</text>'
    for number, (name, count, seconds) in enumerate(zip(("ours", "unpatched"), row.answered, row.seconds, strict=True)):
        y, width = top + BAR * number, max(2, round(FULL * count / most))
        yield f'<rect class="{name}" x="{LEFT}" y="{y}" width="{width}" height="{BAR - 2}"/>'
        yield f'<text x="{LEFT + width + 8}" y="{y + 16}">{words(count, seconds)}</text>'


def _colours(of: dict[str, str]) -> str:
    boxes = "".join(f".{name}{{fill:{of[name]}}}" for name in ("page", "ours", "unpatched"))
    return f"{boxes}text{{fill:{of['ink']}}}"


if __name__ == "__main__":
    PICTURE.write_text(render(), encoding="utf-8")
