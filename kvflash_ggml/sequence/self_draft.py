"""A self-draft: tokens that the pool alone predicts after a text, computed behind it and dropped as a whole."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from ..arrays import Int32s
from .step import EVERY

if TYPE_CHECKING:
    from .sequence import Sequence


class SelfDraft:
    """A text and its self-draft, as the nested drafters see it. Used in a `with`, which drops the self-draft.

    room: most tokens that it evaluates; the text has room for them. The text's follower hears of the self-draft, and at
    the end that none of it counts.
    """

    branch_room = 0

    def __init__(self, text: Sequence, room: int) -> None:
        self._text = text
        self._room = room

    def __enter__(self) -> SelfDraft:
        text = self._text
        text.begin(self._room)
        if text.scoring is not None and text.scoring.is_ready:
            text.relevance.take_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._text.settle()

    @property
    def tokens(self) -> Int32s:
        """The tokens of the text and of the self-draft."""
        return self._text.ids[: self._text.length + self._text.ahead]

    @property
    def left(self) -> int:
        """Tokens that there is room for."""
        return self._room - self._text.ahead

    @property
    def room_ahead(self) -> int:
        """Tokens that one step can evaluate, if some of them may be dropped."""
        info, max_rows = self._text.engine.info, len(self._text.engine.token)
        return min(self.left, info.rs_planes + 1 if info.recurrent else max_rows)

    def write(self, tokens: list[int]) -> None:
        """Evaluate tokens behind the others, in one step. The logits of each of them are available then."""
        rows = np.array(tokens, np.int32)
        self._text.compute(self._text.prepare(rows, EVERY, generated=True, ahead=self._room, self_draft=True))

    def retain(self, length: int) -> bool:
        """Cut text and self-draft to `length` tokens; the next tokens follow there.

        False, and nothing cut, where the memory cannot roll back: then nothing can follow.
        """
        text = self._text
        text.unfinished.settle()
        text.unfinished.work = partial(self._retain, length)
        text.unfinished.settle()
        return len(self.tokens) == length

    def _retain(self, length: int) -> None:
        """Cut once. It can be repeated after an interrupt."""
        text, ahead = self._text, self._text.draft_rows
        assert ahead is not None
        count = length - ahead.start
        if count < len(ahead.tokens):
            if not text.engine.truncate(length, seq=text.seq):
                return
            text.mask.truncate()
            text.draft_rows = replace(ahead, tokens=ahead.tokens[:count])
        if text.follower is not None:
            text.follower.retained(length)
