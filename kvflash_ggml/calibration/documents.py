"""Synthetic documents: prose that the package ships, with one fact of every form somewhere in it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files

import numpy as np

from ..arrays import Int32s
from .facts import Fact, make_facts

Tokenize = Callable[[str], Sequence[int]]

EDGE = 0.03
"""Share of the document at both ends that is free of facts: what stays resident anyway says nothing about recall."""

FACT_TOKENS = 24
"""Room for a fact, roughly."""


@dataclass(frozen=True, slots=True)
class Document:
    """tokens: the text. facts: what is in it, with the half-open span of tokens of each."""

    tokens: Int32s
    facts: tuple[tuple[Fact, tuple[int, int]], ...]


def compose(tokenize: Tokenize, *, n_tokens: int, seed: int) -> Document:
    """A document of about `n_tokens`, the same for the same arguments. The prose is repeated if it is too short."""
    rng = random.Random(seed)
    facts = make_facts(rng)
    prose = [tokenize(sentence + " ") for sentence in _sentences(rng)]
    used, at = 0, 0
    while used < n_tokens - FACT_TOKENS * len(facts):
        used += len(prose[at % len(prose)])
        at += 1
    places = sorted(rng.sample(range(int(EDGE * at), max(int((1 - EDGE) * at), len(facts))), len(facts)))
    tokens: list[int] = []
    found: list[tuple[Fact, tuple[int, int]]] = []
    for i in range(at):
        if places and places[0] == i:
            places.pop(0)
            fact, start = facts[len(found)], len(tokens)
            tokens += tokenize(fact.sentence + " ")
            found.append((fact, (start, len(tokens))))
        tokens += prose[i % len(prose)]
    return Document(np.array(tokens, np.int32), tuple(found))


def question(words: str) -> str:
    """What stands after the document."""
    return f"\n\nQuestion: {words}\nAnswer:"


def _sentences(rng: random.Random) -> list[str]:
    text = (files(__package__) / "filler.txt").read_text(encoding="utf-8")
    paragraphs = text.strip().split("\n\n")
    rng.shuffle(paragraphs)
    return [sentence for paragraph in paragraphs for sentence in re.split(r"(?<=\.) ", paragraph)]
