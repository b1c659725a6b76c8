"""Documents for lm-eval: passages of a text, and facts in them with four answers to choose from."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

TEXT = Path(__file__).parents[2] / "tests/text/stdlib-docs.txt"
PLACES = ("silver harbor", "north lamp", "stone river", "amber walk")
BEFORE, AFTER = 4000, 40
"""Characters of a passage, and of the text behind it that is to be predicted."""


def _passages(count: int) -> list[str]:
    text, rng = TEXT.read_text(encoding="utf-8"), random.Random(7)
    starts = (rng.randrange(len(text) - BEFORE - AFTER) for _ in range(count))
    return [text[at : at + BEFORE + AFTER] for at in starts]


def _split(docs: list[dict[str, Any]]) -> dict[str, Any]:
    from datasets import Dataset

    return {"test": Dataset.from_list(docs)}


def continued(**_: Any) -> dict[str, Any]:
    """Return passages and the text behind them."""
    return _split([{"before": one[:BEFORE], "after": one[BEFORE:]} for one in _passages(4)])


def recalled(**_: Any) -> dict[str, Any]:
    """Return passages with a fact in them, the question, and four answers."""
    rng, docs = random.Random(8), []
    for place, passage in zip(PLACES, _passages(4), strict=True):
        codes = [str(code) for code in rng.sample(range(1_000_000, 10_000_000), 4)]
        at, right = rng.randrange(BEFORE), rng.randrange(4)
        fact = f"\nThe access code for {place} is {codes[right]}.\n"
        text = f"{passage[:at]}{fact}{passage[at:BEFORE]}\nWhat is the access code for {place}?\n"
        docs.append({"text": f"{text}The access code for {place} is", "codes": codes, "right": right})
    return _split(docs)
