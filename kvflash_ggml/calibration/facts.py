"""Facts of many forms, each asked in its own words and in others: what a model is calibrated with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fact:
    """A sentence, a question in its words, and one in others. value: the answer."""

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
    """One fact of each form, in random order, about different persons."""
    names = rng.sample(NAMES, len(FORMS))
    facts = []
    for form, values, subject in zip(FORMS, VALUES, names, strict=True):
        value = rng.choice(values)
        sentence, verbatim, reworded = (text.format(s=subject, v=value) for text in form)
        facts.append(Fact(sentence, verbatim, reworded, value))
    rng.shuffle(facts)
    return facts
