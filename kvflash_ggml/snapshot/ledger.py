"""A page table in a container: the section `ledger`, and the facts beside it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..constants import CHUNK
from ..pool.page_table import ANY, PageTableState
from ..pool.plan import ABSENT
from .container import Container
from .facts import LARGEST, count, fact

LEDGER = np.dtype([("block", "<i4"), ("scored", "<u4"), ("score", "<f8"), ("last_use", "<u8")])
"""One chunk: its block in the pool, -1 if it is on the host only, -2 for any block; whether it has a score, the score,
and the clock of its last use."""


def rows(table: PageTableState) -> npt.NDArray[np.void]:
    """A table as it is written."""
    rows = np.zeros(len(table.blocks), LEDGER)
    rows["block"] = table.blocks
    rows["last_use"] = table.last_use
    if table.scores is not None:
        known = min(len(table.scores), len(rows))
        rows["scored"][:known] = 1
        rows["score"][:known] = table.scores[:known]
    return rows


def read(container: Container, length: int) -> PageTableState:
    """The table of a text of `length` tokens. SnapshotError if there can be none such."""
    rows = container.section("ledger").array(LEDGER, most=-(-length // CHUNK))
    if len(rows) != -(-length // CHUNK):
        raise container.contradiction("ledger")
    blocks, uses, clock = rows["block"].tolist(), rows["last_use"].tolist(), count(container, "clock")
    resident = [block for block in blocks if block not in (ABSENT, ANY)]
    scored = int(rows["scored"].sum(dtype=np.int64))
    pins = fact(container, "pins", list)
    sound = (
        all(block >= 0 for block in resident)
        and len(set(resident)) == len(resident)
        and max(uses, default=0) <= clock
        and np.array_equal(rows["scored"], np.arange(len(rows)) < scored)
        and all(type(pin) is int and 0 <= pin <= LARGEST for pin in pins)
    )
    if not sound:
        raise container.contradiction("ledger")
    return PageTableState(
        blocks=blocks,
        last_use=uses,
        clock=clock,
        settled=fact(container, "settled", bool),
        pins=frozenset(pins),
        scores=rows["score"][:scored].copy() if scored else None,
    )
