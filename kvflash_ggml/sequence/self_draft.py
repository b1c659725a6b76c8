"""A self-draft: what the pool alone predicts after a text, computed ahead of it and dropped as a whole."""

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

    room: tokens that it evaluates at most; the text has room for them. The text's follower hears of the self-draft, and
    at the end that none of it counts.
    """

    branch_room = 0

    def __init__(self, session: Sequence, room: int) -> None:
        self._session = session
        self._room = room

    def __enter__(self) -> SelfDraft:
        self._session.begin_self_draft(self._room)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.settle()

    @property
    def tokens(self) -> Int32s:
        """Those of the text, and those that are sketched after them."""
        return self._session.ids[: self._session.length + self._session.ahead]

    @property
    def left(self) -> int:
        """Tokens that there is room for."""
        return self._room - self._session.ahead

    @property
    def room_ahead(self) -> int:
        """Tokens that one step can evaluate, if some of them are not to stay."""
        info, most = self._session.engine.info, len(self._session.engine.token)
        return min(self.left, info.rs_planes + 1 if info.recurrent else most)

    def write(self, tokens: list[int]) -> None:
        """Evaluate tokens behind the others, in one step. The logits of each of them are at hand then."""
        rows = np.array(tokens, np.int32)
        self._session.compute(self._session.prepare(rows, EVERY, generated=True, ahead=self._room, self_draft=True))

    def retain(self, length: int) -> bool:
        """Of text and sketch so many tokens stay, and what is written next follows them.

        False, and all stay, where the memory cannot go back over the others: then nothing can follow.
        """
        session = self._session
        session.unfinished.settle()
        session.unfinished.work = partial(self._retain, length)
        session.unfinished.settle()
        return len(self.tokens) == length

    def _retain(self, length: int) -> None:
        """Can be done again wherever it was interrupted."""
        session, ahead = self._session, self._session.draft_rows
        assert ahead is not None
        count = length - ahead.start
        if count < len(ahead.tokens):
            if not session.engine.truncate(length, seq=session.seq):
                return
            session.mask.truncate()
            session.draft_rows = replace(ahead, tokens=ahead.tokens[:count])
        if session.follower is not None:
            session.follower.retained(length)
