"""What drafters knew of a text, in a snapshot. Byte by byte: docs/snapshot-format.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..state.draft import Origin, SavedDraft
from .container import Container, Writer

FACT = "speculation"
MAX_DRAFTS = 16
LARGEST = 2**31 - 1


def write(writer: Writer, saved: Sequence[SavedDraft]) -> list[dict[str, Any]]:
    """A part for each, in sections of its own. Returns the facts."""
    facts = []
    for number, one in enumerate(saved):
        with writer.part(_prefix(number)):
            writer.section("context", one.context.read())
            writer.section("rows", one.rows.read())
        origin = one.origin
        facts.append({
            "name": origin.name, "model": origin.model, "window": origin.window, "types": list(origin.types),
            "length": one.length, "first": one.first, "end": one.end,
        })  # fmt: skip
    return facts


def read(container: Container, length: int) -> list[SavedDraft]:
    """The parts of a text of so many tokens; none in a file without. SnapshotError if they cannot be as they say.

    Their sections are read when a drafter adopts them.
    """
    facts = container.facts.get(FACT, [])
    if not isinstance(facts, list) or len(facts) > MAX_DRAFTS:
        raise container.contradiction(FACT)
    return [_read(container, number, fact, length) for number, fact in enumerate(facts)]


def _read(container: Container, number: int, facts: object, length: int) -> SavedDraft:
    if not isinstance(facts, dict):
        raise container.contradiction(FACT)
    name, model, types = (facts.get(key) for key in ("name", "model", "types"))
    told, first, end, window = (facts.get(key) for key in ("length", "first", "end", "window"))
    whole = [x for x in (told, first, end, window) if type(x) is int and 0 <= x <= LARGEST]
    sound = isinstance(name, str) and isinstance(model, str) and len(whole) == 4
    if not sound or not whole[1] <= whole[2] <= whole[0] <= length:
        raise container.contradiction(FACT)
    if not isinstance(types, list) or [type(x) for x in types] != [int, int]:
        raise container.contradiction(FACT)
    part = container.part(_prefix(number), facts)
    return SavedDraft(
        origin=Origin(str(name), str(model), whole[3], (types[0], types[1])),
        length=whole[0],
        first=whole[1],
        end=whole[2],
        context=part.section("context"),
        rows=part.section("rows"),
    )


def _prefix(number: int) -> str:
    return f"{FACT} {number} "
