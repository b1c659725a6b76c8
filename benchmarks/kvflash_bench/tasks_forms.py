"""The recall tasks for models from outside: twelve facts of twelve forms in a real text, asked in the model's own chat.

Every fact is asked for twice: in the words of its sentence, and reworded.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvflash_ggml.errors import ConfigError

from .asks import Case, FreeAsk, Setting
from .forms import SETS, Form
from .tasks import SPREAD, compose

FIRST, LAST = 0.04, 0.96
"""Depths of the first and the last fact."""

STRETCHES = 8
"""Into so many the text is cut, which the two sets of facts take by turns: they share no document either."""

BEFORE_QUESTION = "\n\nQuestion: "


PREAMBLE = (
    "I have read the whole document that you gave me, from its first page to its last, and I looked for the sentence "
    "that says it. Some of the pages are about programs and some are about the terms under which they may be used, so "
    "it took me a while to find the right place. I am glad to help you with it. Here is the answer, in the words of "
    "the text. "
)
"""What an answer can begin with that has nothing to do with what was asked."""


def forms(setting: Setting, rng: random.Random) -> list[Case]:
    """One document with a fact of each form, in an order of its own. Ignores `depths`."""
    return [_document(setting, rng)]


def late(setting: Setting, rng: random.Random) -> list[Case]:
    """The same, where each answer has said something else before it comes to the fact."""
    return [_document(setting, rng, preamble=PREAMBLE)]


def chosen_set(setting: Setting, rng: random.Random) -> list[tuple[Form, str]]:
    """Return the forms of the setting's set in a random order, each with a value. ConfigError for an unknown set."""
    if setting.fact_set not in SETS:
        raise ConfigError(f"there is no set {setting.fact_set!r} of facts: use one of {', '.join(SETS)}")
    chosen = [(form, rng.choice(form.values)) for form in SETS[setting.fact_set]]
    rng.shuffle(chosen)
    return chosen


def _document(setting: Setting, rng: random.Random, preamble: str = "") -> Case:
    frame = setting.frame
    chosen = chosen_set(setting, rng)
    lines = [form.sentence.format(v=value) for form, value in chosen]
    document = spread(setting, lines)
    asks = tuple(
        FreeAsk(
            tail=f"{BEFORE_QUESTION}{question}{frame.before_answer}{'' if preamble else lead}",
            said=f"{preamble}{lead}" if preamble else "",
            answer=value,
            label=label,
            gold=(setting.span(document, line, value, shift=frame.size),),
            anchors=tuple(x for x in (*form.values, *form.anchors) if x != value),
        )
        for (form, value), line in zip(chosen, lines, strict=True)
        for label, question, lead in (
            ("verbatim", form.question, form.lead),
            ("reworded", form.reworded, form.reworded_lead),
        )
    )
    return Case(document=frame.before_document + document, asks=asks, special=frame.special)


def spread(setting: Setting, lines: Sequence[str], *, text: str | None = None, start: float | None = None) -> str:
    """Return a document in which the lines lie in their order, equally far apart.

    text: what it is made of; None for the set's part of the setting's text. start: where in the text it begins, as a
    share of it; None for a place that goes by the seed.
    """
    step = (LAST - FIRST) / (len(lines) - 1)
    return compose(
        text_of(setting.text, setting.fact_set) if text is None else text,
        setting.tokenize,
        lines=[(FIRST + i * step, line) for i, line in enumerate(lines)],
        n_tokens=setting.n_tokens - setting.frame.size,
        start=setting.seed * SPREAD % 1 if start is None else start,
    )


def text_of(text: str, fact_set: str) -> str:
    """The stretches of the text that documents of a set are made of."""
    lines = text.splitlines(keepends=True)
    first = list(SETS).index(fact_set)
    cuts = [len(lines) * i // STRETCHES for i in range(STRETCHES + 1)]
    return "".join("".join(lines[cuts[i] : cuts[i + 1]]) for i in range(first, STRETCHES, len(SETS)))
