"""What ends of prompts have found, in a snapshot. Byte by byte: docs/snapshot-format.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..constants import CHUNK
from ..state.session import Replay
from . import ledger
from .container import Container, Writer
from .facts import count, fact

FACT = "found"
MAX_FOUND = 16
"""In a file: more than a text keeps today (sequence/scoring.py), so that one that keeps more could be read here."""

MAX_TOKENS = 1 << 16
"""Of one step."""


def write(writer: Writer, found: Sequence[Replay]) -> list[dict[str, Any]]:
    """A part for each, in sections of its own. Returns the facts."""
    facts = []
    for number, one in enumerate(found):
        with writer.part(_prefix(number)):
            writer.section("tokens", one.tokens.astype("<i4"))
            writer.section("ledger", ledger.rows(one.table))
            if one.ranking is not None:
                writer.section("ranking", one.ranking.astype("<f8"))
        table = one.table
        facts.append({
            "start": one.start, "rebuild": one.rebuild, "due": one.due,
            "clock": table.clock, "settled": table.settled, "pins": sorted(table.pins),
        })  # fmt: skip
    return facts


def read(container: Container, policy: dict[str, Any], length: int) -> list[Replay]:
    """Those of a text of so many tokens; none in a file without. SnapshotError if they cannot be as they say."""
    facts = policy.get(FACT, [])
    if not isinstance(facts, list) or len(facts) > MAX_FOUND or not all(isinstance(one, dict) for one in facts):
        raise container.contradiction(FACT)
    return [_read(container.part(_prefix(number), one), length) for number, one in enumerate(facts)]


def _read(part: Container, length: int) -> Replay:
    start = count(part, "start", most=length)
    tokens = part.section("tokens").array("<i4", most=MAX_TOKENS).astype(np.int32, copy=False)
    ranking = None
    if "ranking" in part:
        ranking = part.section("ranking").array("<f8", most=(start + len(tokens)) // CHUNK).copy()
    return Replay(
        start=start,
        tokens=tokens,
        table=replace(ledger.read(part, start), pins=frozenset()),  # these are of a request
        rebuild=fact(part, "rebuild", bool),
        ranking=ranking,
        due=fact(part, "due", bool),
    )


def _prefix(number: int) -> str:
    return f"{FACT} {number} "
