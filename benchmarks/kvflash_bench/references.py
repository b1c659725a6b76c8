"""Documents that refer back to themselves, in forms that the models of `tests/models` were trained on.

What stands at the end of each can be predicted only with what stood near its beginning, so the probabilities that a
model gives it while it reads tell whether that was visible to it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from kvflash_ggml.errors import ConfigError

from .asks import Setting

FIRST, AGAIN = 0.15, 0.85
"""Depths at which something stands for the first time, and at which it is referred to."""

PASSAGES = (128, 512)
"""Tokens of a passage that is copied, about."""

WARM = 16
"""Tokens of a second copy that only say which passage it is."""

ENTRIES = 24
"""Variables that are assigned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A document, and the token spans [first, end) in it that refer back. label: its row of results."""

    document: str
    label: str
    spans: tuple[tuple[int, int], ...]


def refer(kind: str, setting: Setting, *, seed: int) -> list[Reference]:
    """One trial of a kind. The same arguments give the same documents."""
    if kind not in REFERENCES:
        raise ConfigError(f"there is no kind {kind!r}: use one of {', '.join(REFERENCES)}")
    return REFERENCES[kind](setting, random.Random(f"{kind} {seed}"))


def copy(setting: Setting, rng: random.Random) -> list[Reference]:
    """A passage of other text, and far after it the same passage again."""
    out = []
    for size in PASSAGES:
        passage = _passage(setting, rng, size)
        first, again = f"Text:\n{passage}", f"Text again:\n{passage}"
        document = setting.document(rng, [(FIRST, first), (AGAIN, again)])
        lo, hi = setting.span(document, again, passage)
        out.append(Reference(document=document, label=f"{size} tokens", spans=((lo + WARM, hi),)))
    return out


def table(setting: Setting, rng: random.Random) -> list[Reference]:
    """Variables assigned in one place, and far after it asserted in another order."""
    given, asserted, values = _variables(setting, rng)
    lines = [(FIRST, "\n".join(given)), (AGAIN, "\n".join(asserted))]
    return [_asserted(setting, setting.document(rng, lines), "in one place", asserted, values)]


def scattered(setting: Setting, rng: random.Random) -> list[Reference]:
    """Variables assigned all over the first half of the text, and asserted in one place after it."""
    given, asserted, values = _variables(setting, rng)
    lines = [(rng.uniform(0.05, 0.5), line) for line in given] + [(AGAIN, "\n".join(asserted))]
    return [_asserted(setting, setting.document(rng, lines), "all over", asserted, values)]


REFERENCES: dict[str, Callable[[Setting, random.Random], list[Reference]]] = {
    "copy": copy,
    "table": table,
    "scattered": scattered,
}


def _passage(setting: Setting, rng: random.Random, size: int) -> str:
    """Whole lines of the text, `size` tokens or a little more."""
    lines = [line for line in setting.text.splitlines() if line.strip()]
    at = rng.randrange(len(lines))
    picked: list[str] = []
    total = 0
    while total < size:
        picked.append(lines[(at + len(picked)) % len(lines)])
        total += len(setting.tokenize(picked[-1] + "\n"))
    return "\n".join(picked)


def _variables(setting: Setting, rng: random.Random) -> tuple[list[str], list[str], list[str]]:
    """Assignments in one order; assertions, and the values in them, in another."""
    facts = setting.facts(rng, ENTRIES)
    names = [fact.name.replace(" ", "_") for fact in facts]
    given = [f"{name} = {fact.value}" for name, fact in zip(names, facts, strict=True)]
    order = rng.sample(range(len(facts)), len(facts))
    asserted = [f"assert {names[i]} == {facts[i].value}" for i in order]
    return given, asserted, [facts[i].value for i in order]


def _asserted(setting: Setting, document: str, label: str, asserted: list[str], values: list[str]) -> Reference:
    spans = tuple(setting.span(document, line, value) for line, value in zip(asserted, values, strict=True))
    return Reference(document=document, label=label, spans=spans)
