"""What the newest prompts have found at their ends, for who asks the same again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import Int32s
from ..state.session import Found

MAX_FOUND = 8
"""Ends of prompts that are known of a text."""


class Findings:
    """Of one text: each is good as long as nothing before its step changes, whatever has followed it since."""

    def __init__(self) -> None:
        self._known: tuple[Found, ...] = ()

    def keep(self, found: Found) -> None:
        """The newest one."""
        others = [one for one in self._known if not _asks(one, found.start, found.tokens)]
        self._known = (*others, found)[-MAX_FOUND:]

    def at(self, start: int, tokens: Int32s) -> Found | None:
        """What was found when a text of `start` tokens went on with these, and its prompt ended with them."""
        return next((one for one in self._known if _asks(one, start, tokens)), None)

    def within(self, shared: int, prompt: Int32s) -> Found | None:
        """The same for a prompt of which the first `shared` tokens are those of the text."""
        return next(
            (one for one in self._known if one.start <= shared and _asks(one, one.start, prompt[one.start :])), None
        )

    def truncate(self, length: int) -> None:
        """The text was cut to `length` tokens. Can be called again."""
        self._known = tuple(one for one in self._known if one.start <= length)

    def state(self) -> Sequence[Found]:
        """All of them, to be loaded later."""
        return self._known

    def load(self, found: Sequence[Found]) -> None:
        """Take over those of a text that has been put back, or the newest of them."""
        self._known = tuple(found[-MAX_FOUND:])


def _asks(one: Found, start: int, tokens: Int32s) -> bool:
    return one.start == start and np.array_equal(one.tokens, tokens)
