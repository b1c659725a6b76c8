"""Questions that need several places of a document: to count, to list, to compare, and to follow from one to the next.

Asked in the model's own chat, as the facts of `forms` are.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from .asks import Ask, Case, FreeAsk, Setting
from .tasks_forms import BEFORE_QUESTION, spread

PEOPLE = ("Conrad", "Rupert", "Oswald", "Gregor", "Ludwig", "Casper", "Magnus", "Edgar", "Florian", "Bertram")
COUNTS = ("two", "three", "four", "five", "six")
COLOURS = ("turquoise", "maroon", "crimson", "indigo", "scarlet", "beige")
TOWNS = ("Wexcombe", "Ostrand", "Molvik", "Dunley", "Brannock", "Tamsel")

MEMBER = "One of the members of the {club} club is {who}."
HEIGHT = "The bell tower of {town} is {height} metres high."
BESIDE = "The silver whistle lies in the same drawer as the harbour map."
DRAWER = "The harbour map lies in the {colour} drawer."


@dataclass(frozen=True, slots=True, kw_only=True)
class ListAsk(Ask):
    """A question for several names. answer: all of them. others: names that are none."""

    names: tuple[str, ...]
    others: tuple[str, ...]

    def is_correct(self, reply: str) -> bool:
        """Whether the first sentence names all of them, and no other."""
        said = reply.partition(".")[0]
        return all(name in said for name in self.names) and not any(name in said for name in self.others)

    def is_settled(self, reply: str) -> bool:
        return "." in reply


def whole(setting: Setting, rng: random.Random) -> list[Case]:
    """One document: two clubs with members in turn, two heights, and a thing whose place another sentence says.

    Ignores `depths`.
    """
    people, colour = rng.sample(PEOPLE, len(PEOPLE)), rng.choice(COLOURS)
    count = rng.randrange(len(COUNTS))
    members, others = people[: count + 2], people[count + 2 : count + 5]
    towns, heights = rng.sample(TOWNS, 2), rng.sample(range(41, 99), 2)
    higher, lower = (towns[i] for i in sorted((0, 1), key=lambda i: -heights[i]))
    mine = [MEMBER.format(club="chess", who=who) for who in members]
    towers = [HEIGHT.format(town=town, height=height) for town, height in zip(towns, heights, strict=True)]
    drawers = [BESIDE, DRAWER.format(colour=colour)]
    lines = mine + [MEMBER.format(club="rowing", who=who) for who in others] + towers + drawers
    rng.shuffle(lines)
    frame = setting.frame
    document = spread(setting, lines, text=setting.text, start=rng.random())

    def spans(needed: Sequence[str]) -> tuple[tuple[int, int], ...]:
        return tuple(setting.span(document, line, shift=frame.size) for line in needed)

    def tail(question: str, lead: str) -> str:
        return f"{BEFORE_QUESTION}{question}{frame.before_answer}{lead}"

    asks = (
        FreeAsk(
            tail=tail("How many members does the chess club have?", "The number of members of the chess club is"),
            answer=COUNTS[count],
            label="count",
            gold=spans(mine),
            anchors=("one", "seven", "eight", "nine", "ten", *(x for x in COUNTS if x != COUNTS[count])),
        ),
        ListAsk(
            tail=tail("Who are the members of the chess club?", "The members of the chess club are"),
            answer=", ".join(members),
            label="list",
            gold=spans(mine),
            names=tuple(members),
            others=tuple(others),
        ),
        FreeAsk(
            tail=tail(
                f"Which bell tower is higher, {' or '.join(sorted(towns))}?", "The higher bell tower is the one of"
            ),
            answer=higher,
            label="compare",
            gold=spans(towers),
            anchors=(lower,),
        ),
        FreeAsk(
            tail=tail("In which drawer is the silver whistle?", "The silver whistle lies in the drawer that is"),
            answer=colour,
            label="follow",
            gold=spans(drawers),
            anchors=(*(x for x in COLOURS if x != colour), "red", "green", "blue", "black", "white", "brown", "silver"),
        ),
    )
    return [Case(document=frame.before_document + document, asks=asks, special=frame.special)]
