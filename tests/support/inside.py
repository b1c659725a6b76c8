"""The private parts of `Llama` that tests reach: the only file of the tests that knows their names."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest


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
    """The parts of one model. llm: a Llama, or another object that keeps a session."""

    session = Part("_session")
    speculator = Part("_speculator")
    drafting = Part("_drafting")
    finder = Part("_finder")
    prefixes = Part("_prefixes")
    config = Part("_config")
    size = Part("_size")
    room = Part("_room")
    snapshot_store = Part("_snapshot_store")
    saved = Part("_saved")
    go_on_from = Part("_go_on_from")
    keep_prefix = Part("_keep_prefix")

    def __init__(self, llm: Any) -> None:
        self.llm = llm


inside = Inside

PRIVATE = frozenset(
    [
        "_make_context",
        *(name for part in vars(Inside).values() if isinstance(part, Part) for name in part.name.split(".")),
    ]
)
"""Names that no other file of the tests may write."""


def let_make_contexts(
    monkeypatch: pytest.MonkeyPatch, llm: Any, instead: Callable[[Callable[[Any], Any], Any, Any], Any]
) -> None:
    """Have contexts for a resized pool made by instead(make, size, session). make(size): how it is done otherwise."""
    make = type(llm)._make_context

    def made(self: Any, size: Any) -> Any:
        return instead(lambda size: make(self, size), size, self._session)

    monkeypatch.setattr(type(llm), "_make_context", made)
