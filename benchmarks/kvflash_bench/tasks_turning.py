"""Recall tasks in which one answer turns from fact to fact, with no new prompt between them.

The prompt names none of the facts. The answer's own words ask for them: its text up to each value is given, and the
model says the value.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from .asks import Ask, Case, FreeAsk, Setting
from .tasks_forms import BEFORE_QUESTION, chosen_set, spread

TURNS = 7
"""Facts that an answer turns to."""

QUESTION = "Some sentences of this document have nothing to do with its subject. What do they say?"

TURNING = (
    "There are several of them, and they stand far apart from each other. The first one is easy to overlook. It says: ",
    "\nNow I turn to another page, which is about something else altogether. There the text says: ",
    "\nThe next sentence of this kind stands in a very different place, between two long paragraphs. It says: ",
    "\nI have found one more of them, and again it does not belong to what is around it. It reads: ",
    "\nThen there is a sentence that somebody must have put there by mistake. In full it says: ",
    "\nGoing on through the pages, one comes to a line that stands quite alone. This is what it says: ",
    "\nFinally, I would like to mention the last one that I can see, since it is odd too. It says: ",
)
"""What an answer says before each fact."""

GOODS = {
    "choose": ("A pound of {good} costs {v} crowns.", "How much does a pound of each of the goods cost?",
               ("cardamom", "saffron", "fennel", "turmeric", "nutmeg", "paprika", "cumin", "thyme", "ginger", "vanilla",
                "sesame", "cloves")),
    "confirm": ("The number of crates of {good} in the warehouse is {v}.", "How many crates of each kind are there?",
                ("lanterns", "saddles", "candles", "anchors", "violins", "kettles", "umbrellas", "carpets", "buckles",
                 "bells", "mirrors", "helmets")),
}  # fmt: skip
"""By set: the sentence of a list's entry, the question for the list, and the entries."""


def turning(setting: Setting, rng: random.Random) -> list[Case]:
    """A document of `forms`, and one answer that turns to seven of its facts. Ignores `depths`."""
    chosen = chosen_set(setting, rng)
    lines = [form.sentence.format(v=value) for form, value in chosen]
    asked = [(at, *chosen[at]) for at in rng.sample(range(len(chosen)), TURNS)]
    facts = [
        (lines[at], f"{said}{form.lead}", value, tuple(x for x in (*form.values, *form.anchors) if x != value))
        for said, (at, form, value) in zip(TURNING, asked, strict=True)
    ]
    return [_case(setting, lines, QUESTION, facts)]


def listing(setting: Setting, rng: random.Random) -> list[Case]:
    """Twelve facts of one form, and one answer that lists seven of them: the value follows its key at once. Ignores
    `depths`.
    """
    chosen_set(setting, rng)
    sentence, question, goods = GOODS[setting.fact_set]
    values = [str(value) for value in rng.sample(range(113, 989), len(goods))]
    order = rng.sample(range(len(goods)), len(goods))
    lines = {at: sentence.format(good=goods[at], v=values[at]) for at in order}
    facts = [(lines[at], f"\n- {goods[at]}:", values[at], ()) for at in rng.sample(order, TURNS)]
    return [_case(setting, list(lines.values()), question, facts)]


def _case(
    setting: Setting, lines: Sequence[str], question: str, facts: Sequence[tuple[str, str, str, tuple[str, ...]]]
) -> Case:
    """Return a document with these lines and one answer. facts: the line of each, what the answer says before its
    value, the value, and wrong answers of its kind.
    """
    frame = setting.frame
    document = spread(setting, lines)
    asks: list[Ask] = [
        FreeAsk(
            tail="" if i else f"{BEFORE_QUESTION}{question}{frame.before_answer}",
            said=said,
            goes_on=i > 0,
            answer=value,
            label="first" if i == 0 else "later",
            gold=(setting.span(document, line, value, shift=frame.size),),
            anchors=anchors,
        )
        for i, (line, said, value, anchors) in enumerate(facts)
    ]
    return Case(document=frame.before_document + document, asks=tuple(asks), special=frame.special)
