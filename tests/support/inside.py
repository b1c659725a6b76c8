"""The private parts of `Llama` that tests reach: the only file of the tests that knows their names."""

from __future__ import annotations

from operator import attrgetter
from typing import Any


class Part:
    """An attribute that stands for a private one of the model. name: that one's, with dots where it lies deeper."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, inside: Inside, owner: type[Inside]) -> Any:
        return attrgetter(self.name)(inside.llm)

    def __set__(self, inside: Inside, value: object) -> None:
        holder, _, name = self.name.rpartition(".")
        setattr(attrgetter(holder)(inside.llm) if holder else inside.llm, name, value)


class Inside:
    """The parts of one model. llm: a Llama; for `own_session` another object that keeps a text on a pool."""

    session = Part("_at_hand.sequence")
    slow = Part("_at_hand._slow")
    speculator = Part("_at_hand.speculator")
    drafting = Part("_pooled.drafting")
    finder = Part("_at_hand.model.finder")
    prefixes = Part("_at_hand.prefixes")
    config = Part("_opening.config")
    drafter_reader = Part("_at_hand.sequence.scoring.scorer._reader")
    own_session = Part("_session")
    size = Part("_opening.size")
    room = Part("_opening.room")
    snapshot_store = Part("_saver.store")
    saved = Part("_saver.saved")
    go_on_from = Part("_saver.go_on_from")
    keep_prefix = Part("_saver.keep_prefix")

    def __init__(self, llm: Any) -> None:
        self.llm = llm


inside = Inside

PRIVATE = frozenset(
    [
        name
        for part in vars(Inside).values()
        if isinstance(part, Part)
        for name in part.name.split(".")
        if name.startswith("_")
    ]
)
"""Names that no other file of the tests may write."""
