#!/usr/bin/env python3
"""Draws docs/one-request.svg: a step of an answer, between the pool on the device and the page images on the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "one-request.svg"

SINKS, TAIL = 1, 2
"""The defaults of a pool of so few blocks."""

BLOCKS = (0, 2, 3, 5, 8, 10, 11, 12)
"""The chunk in each block before the step. All but the newest are sealed."""

EVICTED, PAGED_IN = 3, 7
NEWEST = 12
POSITION = 831
"""The token that the step computes: the last one of the newest chunk."""

WIDTH, HEIGHT = 880, 510
LEFT, RIGHT = 130, 750
"""Edges of the bands. Arrows between boxes of two bands go beside them."""

LIGHT = {"page": "#ffffff", "band": "#f3f5f7", "box": "#ffffff", "new": "#cfe8ff", "ink": "#1f2328", "line": "#57606a"}
DARK = {"page": "#0d1117", "band": "#171d26", "box": "#222a35", "new": "#163b63", "ink": "#f0f6fc", "line": "#9aa4af"}

BLOCK, BLOCK_STEP, BLOCK_TOP = 66, 74, 150
IMAGE, IMAGE_STEP, IMAGE_TOP = 38, 45, 338


def render() -> str:
    """Return the picture. It has its own background, and the colours of the reader's light or dark theme."""
    parts = (*_head(), *_device(), *_host(), *_arrows(), "</svg>")
    return "\n".join(parts) + "\n"


def _head() -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" font-family="DejaVu Sans, Verdana, sans-serif" font-size="13">'
    )
    yield "<title>A step of an answer: pool, device and host</title>"
    yield (
        f"<desc>1: the page table plans the step. 2: chunk {EVICTED} is evicted, and chunk {PAGED_IN} is paged in. 3: "
        f"the device computes the token. 4: chunk {NEWEST}, which is full now, is paged out. 5: the policy gets "
        f"queries, and scores the chunks. 6: a later plan follows the scores.</desc>"
    )
    yield f"<style>{_colours(LIGHT)}@media (prefers-color-scheme: dark) {{{_colours(DARK)}}}</style>"
    yield (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" markerHeight="5" orient="auto">'
        '<path class="tip" d="M0 0 8 4 0 8z"/></marker></defs>'
    )
    yield f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>'


def _colours(of: dict[str, str]) -> str:
    boxes = "".join(f".{name}{{fill:{of[name]};stroke:{of['line']}}}" for name in ("band", "box", "new"))
    return (
        f".page{{fill:{of['page']}}}{boxes}"
        f"text{{fill:{of['ink']}}}.arrow{{fill:none;stroke:{of['line']};stroke-width:2}}.tip{{fill:{of['line']}}}"
    )


def _device() -> Iterator[str]:
    yield _box("band", LEFT, 16, RIGHT - LEFT, 218)
    yield _text(LEFT + 14, 38, "Device", bold=True)
    yield _box("box", 148, 50, 584, 44)
    yield _text(440, 77, f"3 compute: the token at position {POSITION} sees all chunks in the pool", middle=True)
    yield _text(148, BLOCK_TOP - 10, f"Pool: {len(BLOCKS)} blocks of 64 slots")
    for block, chunk in enumerate(BLOCKS):
        x, y = _block(block), BLOCK_TOP
        new = chunk in (EVICTED, NEWEST)
        yield _box("new" if new else "box", x, y, BLOCK, 66)
        yield _text(x + BLOCK // 2, y + 26, f"chunk {PAGED_IN if chunk == EVICTED else chunk}", middle=True, size=12)
        yield _text(x + BLOCK // 2, y + 48, _note(chunk), middle=True, size=11)


def _note(chunk: int) -> str:
    if chunk == EVICTED:
        return f"was {EVICTED}"
    if chunk == NEWEST:
        return "now full"
    return "sink" if chunk < SINKS else "tail" if chunk >= NEWEST - TAIL else ""


def _host() -> Iterator[str]:
    yield _box("band", LEFT, 300, RIGHT - LEFT, 194)
    yield _text(LEFT + 14, 322, "Host", bold=True)
    for chunk in range(NEWEST + 1):
        x = _image(chunk)
        yield _box("new" if chunk in (PAGED_IN, NEWEST) else "box", x, IMAGE_TOP, IMAGE, 34)
        yield _text(x + IMAGE // 2, IMAGE_TOP + 22, str(chunk), middle=True, size=12)
    yield _text(_image(0), IMAGE_TOP + 52, "Page images: one for each full chunk, resident or not", size=12)
    yield _box("box", 148, 424, 252, 54)
    yield _text(274, 446, "page table", middle=True)
    yield _text(274, 465, "which chunk is in which block", middle=True, size=11)
    yield _box("box", 480, 424, 252, 54)
    yield _text(606, 446, "policy", middle=True)
    yield _text(606, 465, "which chunks the queries ask for", middle=True, size=11)


def _arrows() -> Iterator[str]:
    yield _arrow(148, 451, 112, 451, 112, 72, 146, 72)
    yield from _label(102, 250, "1 plan:", "slots, moves", end=True)
    home = _block(BLOCKS.index(EVICTED)) + BLOCK // 2
    yield _arrow(_image(PAGED_IN) + IMAGE // 2, IMAGE_TOP, home, BLOCK_TOP + 68)
    yield from _label(_image(PAGED_IN) - 14, 262, f"2 page in {PAGED_IN}")
    yield from _label(home - 60, 254, f"evict {EVICTED}:", "nothing moves", end=True)
    yield _arrow(440, BLOCK_TOP - 2, 440, 96)
    yield _text(450, 126, "keys and values")
    last = _block(len(BLOCKS) - 1) + BLOCK // 2
    yield _arrow(last, 94, last, BLOCK_TOP - 2)
    yield _text(last - 10, 126, "new row", end=True)
    yield _arrow(last, BLOCK_TOP + 66, last, IMAGE_TOP - 2)
    yield from _label(last - 10, 262, f"4 page out {NEWEST}", end=True)
    yield _arrow(732, 72, 782, 72, 782, 451, 734, 451)
    yield from _label(792, 250, "5 score:", "queries")
    yield _arrow(618, IMAGE_TOP + 34, 618, 422)
    yield _text(628, 406, "keys")
    yield _arrow(480, 451, 402, 451)
    yield _text(440, 441, "6 scores", middle=True, size=12)


def _block(block: int) -> int:
    """Return the left edge of a block."""
    return 148 + block * BLOCK_STEP


def _image(chunk: int) -> int:
    """Return the left edge of a page image."""
    return 149 + chunk * IMAGE_STEP


def _box(kind: str, x: int, y: int, width: int, height: int) -> str:
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="5"/>'


def _label(x: int, y: int, *lines: str, end: bool = False) -> Iterator[str]:
    for number, line in enumerate(lines):
        yield _text(x, y + 17 * number, line, end=end)


def _text(
    x: int, y: int, words: str, *, middle: bool = False, end: bool = False, bold: bool = False, size: int = 13
) -> str:
    more = ' text-anchor="middle"' if middle else ' text-anchor="end"' if end else ""
    more += ' font-weight="bold"' if bold else ""
    more += f' font-size="{size}"' if size != 13 else ""
    return f'<text x="{x}" y="{y}"{more}>{words}</text>'


def _arrow(*points: int) -> str:
    """Return a line through points (x, y, x, y, ...) with a tip at its end."""
    return f'<polyline class="arrow" marker-end="url(#tip)" points="{" ".join(map(str, points))}"/>'


if __name__ == "__main__":
    PICTURE.write_text(render(), encoding="utf-8")
