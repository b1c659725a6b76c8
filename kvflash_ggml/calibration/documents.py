"""Synthetic documents: prose that the package ships, with one fact of every form somewhere in it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files

import numpy as np

from ..arrays import Int32s


@dataclass(frozen=True, slots=True)
class Fact:
    """A sentence, a question in its words, and a question in other words. value: the answer."""

    sentence: str
    verbatim: str
    reworded: str
    value: str


# sentence, question in its words, question in others; {s} is the subject, {v} the value
FORMS: tuple[tuple[str, str, str], ...] = (
    (
        "The number of the storage room rented by {s} is {v}.",
        "What is the number of the storage room rented by {s}?",
        "Which room does {s} pay for?",
    ),
    ("The password chosen by {s} is the word {v}.", "What is the password chosen by {s}?", "How does {s} log in?"),
    (
        "{s} keeps the spare key in the {v}.",
        "Where does {s} keep the spare key?",
        "If {s} is locked out, what is the place to look?",
    ),
    (
        "{s} takes swimming lessons every {v}.",
        "When does {s} take swimming lessons?",
        "Which day of the week is {s} at the pool?",
    ),
    (
        "The sister of {s} is called {v}.",
        "What is the sister of {s} called?",
        "Who has the same parents as {s}?",
    ),
    (
        "The front door of {s} was painted {v} last summer.",
        "What colour was the front door of {s} painted?",
        "How would a visitor recognise the entrance of {s}?",
    ),
    ("{s} has a {v} as a pet.", "What does {s} have as a pet?", "Which animal lives with {s}?"),
    (
        "{s} paid {v} dollars for the old camera.",
        "How many dollars did {s} pay for the old camera?",
        "What was the price when {s} bought something to take pictures with?",
    ),
    (
        "The dentist expects {s} at {v} o'clock.",
        "At what time does the dentist expect {s}?",
        "When is the appointment of {s} to have a tooth checked?",
    ),
    (
        "For breakfast {s} always eats {v}.",
        "What does {s} always eat for breakfast?",
        "Which food begins the morning of {s}?",
    ),
    ("{s} was born in the year {v}.", "In what year was {s} born?", "How old is {s}, going by the date of birth?"),
    ("{s} works as a {v} in the city.", "What does {s} work as in the city?", "How does {s} earn a living?"),
)

NAMES = (
    "Alice Moreau", "Bernard Quist", "Clara Dunmore", "David Okafor", "Elena Varga", "Felix Brandt", "Grace Holloway",
    "Hugo Lindqvist", "Irene Castellan", "Jonas Whitaker", "Katrin Solberg", "Leon Abernathy", "Marta Kowalska",
    "Nadia Farouk", "Oscar Pelletier", "Paula Jimenez", "Quentin Ashby", "Rosa Marchetti", "Stefan Draganov",
    "Teresa Nakamura", "Ulrich Baumann", "Vera Lindholm", "Walter Ferreira", "Yvonne Castle",
)  # fmt: skip

VALUES: tuple[Sequence[str], ...] = (
    [str(n) for n in range(211, 997, 17)],
    ("lantern", "harvest", "velvet", "compass", "thunder", "marble"),
    ("garage", "mailbox", "cellar", "greenhouse", "attic", "toolbox"),
    ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"),
    ("Johanna", "Miriam", "Beatrice", "Louisa", "Sabine", "Henrietta"),
    ("yellow", "purple", "orange", "turquoise", "black", "pink"),
    ("parrot", "hamster", "tortoise", "goat", "donkey", "snake"),
    [str(n) for n in range(35, 480, 23)],
    ("nine", "eleven", "three", "four", "two", "ten"),
    ("oatmeal", "pancakes", "melon", "toast", "yogurt", "sausages"),
    [str(n) for n in range(1921, 1999, 3)],
    ("plumber", "nurse", "lawyer", "pilot", "tailor", "chemist"),
)


def make_facts(rng: random.Random) -> list[Fact]:
    """Return one fact of each form, in random order, about different persons."""
    names = rng.sample(NAMES, len(FORMS))
    facts = []
    for form, values, subject in zip(FORMS, VALUES, names, strict=True):
        value = rng.choice(values)
        sentence, verbatim, reworded = (text.format(s=subject, v=value) for text in form)
        facts.append(Fact(sentence, verbatim, reworded, value))
    rng.shuffle(facts)
    return facts


Tokenize = Callable[[str], Sequence[int]]

EDGE = 0.03
"""Share of the document at both ends without facts: chunks that stay resident anyway say nothing about recall."""

FACT_TOKENS = 24
"""Room for a fact, roughly."""


@dataclass(frozen=True, slots=True)
class Document:
    """tokens: the text. facts: the facts in it, each with its half-open span of tokens."""

    tokens: Int32s
    facts: tuple[tuple[Fact, tuple[int, int]], ...]


def compose(tokenize: Tokenize, *, n_tokens: int, seed: int) -> Document:
    """Return a document of about `n_tokens`, the same for the same arguments. Prose that is too short is repeated."""
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
    """Return the question as it follows the document."""
    return f"\n\nQuestion: {words}\nAnswer:"


def _sentences(rng: random.Random) -> list[str]:
    text = (files(__package__) / "filler.txt").read_text(encoding="utf-8")
    paragraphs = text.strip().split("\n\n")
    rng.shuffle(paragraphs)
    return [sentence for paragraph in paragraphs for sentence in re.split(r"(?<=\.) ", paragraph)]
