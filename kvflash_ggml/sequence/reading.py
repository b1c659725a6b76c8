"""How a text is read and answered: by what the pool holds, or by all of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..arrays import Int32s


@dataclass(frozen=True, slots=True)
class Reading:
    """exact: prompts see the whole text, through stages. answers_exactly: so does every generated token. why: where
    that was left open, or could not be had, the reason, for people.
    """

    exact: bool = False
    answers_exactly: bool = False
    why: str = ""


POOL = Reading()


@dataclass(slots=True)
class ReadStats:
    """What the newest request has lost against full attention, in tokens.

    read: of its prompt, those that were not known already. read_whole: of these, those that saw the whole text before
    them. generated, generated_whole: the same of its answer. repaired: tokens of the answer that were read again with
    all of the text in view. changed: of these, those after which another token would have been the likeliest.

    ranked: what decided which text is resident when the answer begins: "exact", the attention of the prompt's end to
    every key that was in view (of what was not, the index), or "index", a look at it, and ranked_why for which reason;
    empty where nothing was chosen, and where the policy has a way of its own.
    """

    read: int = 0
    read_whole: int = 0
    generated: int = 0
    generated_whole: int = 0
    repaired: int = 0
    changed: int = 0
    seen: float = 0.0
    ranked: str = ""
    ranked_why: str = ""

    def add_read(self, count: int, share: float) -> None:
        """A step of the prompt saw such a share of the text before it, 0 to 1."""
        self.read += count
        self.read_whole += count if share == 1 else 0
        self.seen += count * share

    @property
    def view(self) -> float | None:
        """Share of the text before them that the tokens of the prompt saw, 0 to 1; None if none were read."""
        return self.seen / self.read if self.read else None


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
