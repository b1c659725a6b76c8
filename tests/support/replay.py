"""The drafts of one answer, proposed again in another: both take the same steps then."""

from __future__ import annotations

from typing import Any

from kvflash_ggml.speculation.base import Features
from kvflash_ggml.speculation.decision import Fixed
from kvflash_ggml.speculation.draft import Draft
from kvflash_ggml.speculation.loop import Speculator
from support.inside import inside


def noted(llm: Any) -> dict[int, Draft | None]:
    """What is verified from now on, by the length of the text without the root."""
    drafts: dict[int, Draft | None] = {}
    propose = inside(llm).speculator.propose

    def noting(text: Any, root: int) -> Draft | None:
        length = len(text.tokens)
        drafts[length] = propose(text, root)
        return drafts[length]

    inside(llm).speculator.propose = noting
    return drafts


class Replay:
    """Proposes what was noted."""

    name = "replay"
    wants = Features()

    def __init__(self, drafts: dict[int, Draft | None]) -> None:
        self._drafts = drafts
        self._length = 0

    def observe(self, start: int, tokens: Any, rows: Any) -> None:
        self._length = start + len(tokens)

    def propose(self, root: int, most: int) -> Draft | None:
        return self._drafts.get(self._length)

    def truncate(self, length: int) -> None:
        self._length = min(length, self._length)

    def close(self) -> None:
        pass


def let_replay(llm: Any, drafts: dict[int, Draft | None], width: int) -> None:
    """Have nothing drafted but what was noted."""
    inside(llm).speculator = Speculator([Replay(drafts)], Fixed(width), n_vocab=llm.n_vocab(), ends=())
    inside(llm).session.follower = inside(llm).speculator
