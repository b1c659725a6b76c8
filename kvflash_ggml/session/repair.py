"""Repair: the newest tokens of an answer are read again with the whole text in view."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..arrays import Int32s
from .reading import Loss
from .step import EVERY, AfterStep

if TYPE_CHECKING:
    from .text import Text

Likeliest = Callable[[int], Int32s]
"""The likeliest next token after each of the last so many rows of which logits are at hand."""


class Repair:
    """When, from where, and what would have been different.

    every: tokens between two repairs. start: the first token that has not been repaired.
    """

    def __init__(self, every: int, n_ctx: int, likeliest: Likeliest) -> None:
        self.start = 0
        self._every = every
        self._likeliest = likeliest
        self._picks = np.full(n_ctx, -1, np.int32)

    def is_due(self, length: int) -> bool:
        return length - self.start >= self._every

    def generated(self, start: int, count: int) -> None:
        """The tokens from `start` on have been evaluated, and their logits are at hand."""
        self._picks[start : start + count] = self._likeliest(count)

    def truncated(self, length: int) -> None:
        """The text has been cut to `length` tokens."""
        self.start = min(self.start, length)
        self._picks[length:] = -1

    def picks(self, end: int) -> Int32s:
        """What was the likeliest after each token before `end` when it was generated, -1 where it was not; [end]."""
        picks: Int32s = self._picks[:end].copy()
        return picks

    def changed(self, picks: Int32s) -> int:
        """The newest tokens have been evaluated again: after how many is another one than these the likeliest?"""
        return int(((picks >= 0) & (picks != self._likeliest(len(picks)))).sum())


def mend(text: Text, repair: Repair, loss: Loss, after: AfterStep | None) -> None:
    """Read the tokens that are due again, each step with the whole text in view, or as much as the stages can hold.

    What goes wrong is raised, and the text has all of its tokens all the same: those that were not reached are read by
    the pool once more, and not repaired later.
    """
    start, end, ranking = repair.start, text.length, text.ranking
    tokens, picks = text.tokens.copy(), repair.picks(end)
    try:
        text.truncate(start)  # to a place further back, where the memory knows no other
        text.ranking = ranking  # which a cut forgets: of a text longer than the stages it says what is in view
        while text.length < end:
            at = text.length
            _read(text, tokens, after, stream=True)
            loss.changed += repair.changed(picks[at : text.length])
            loss.repaired += max(0, text.length - max(at, start))
    except BaseException:
        text.unfinished.settle()
        while text.length < end:
            _read(text, tokens, after, stream=False)
        raise
    finally:
        text.ranking = ranking
        repair.start = text.length


def _read(text: Text, tokens: Int32s, after: AfterStep | None, *, stream: bool) -> None:
    """One step of it."""
    at = text.length
    count = min(len(tokens) - at, text.pool.n_ubatch, text.table.room(at))
    text.evaluate(tokens[at : at + count], EVERY, after, stream=stream)
