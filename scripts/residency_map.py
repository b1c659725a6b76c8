"""A residency map in text: which chunks of a document were on the device, while it was read and at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvflash_ggml.constants import CHUNK
from kvflash_ggml.trace.recorder import Moment

LEVELS = "·▁▃▅▇█"
"""A character's chunks: none of them on the device, ..., all of them."""

CHUNKS = len(LEVELS) - 1
"""Chunks a character."""


def draw(moments: Sequence[Moment], chunk: int, mark: str, *, rows: int = 8) -> Iterator[str]:
    """Lines: moments at about equal distances, each with the tokens read until then; the end; a `mark` below `chunk`.

    moments: of `kvflash.record()`, at least one.
    """
    last = moments[-1]
    for row in range(1, rows):
        goal = last.length * row // rows
        yield _line(min(moments, key=lambda moment: abs(moment.length - goal)))
    yield _line(last)
    yield " " * (len(_line(last)) - len(_cells(last)) + chunk // CHUNKS) + mark


def _line(moment: Moment) -> str:
    return f"{moment.length:7,}  {_cells(moment)}"


def _cells(moment: Moment) -> str:
    """The text that has been read, so that lines grow with it."""
    resident = set(moment.resident)
    chunks = range(-(-moment.length // CHUNK))
    groups = (chunks[at : at + CHUNKS] for at in chunks[::CHUNKS])
    return "".join(LEVELS[-1 if resident.issuperset(group) else len(resident.intersection(group))] for group in groups)
