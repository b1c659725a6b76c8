"""The pool as a drafter: what is resident proposes tokens, and the whole text verifies them at once."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..arrays import Floats, Int32s
from ..errors import KVFlashError
from ..sequence.self_draft import SelfDraft
from ..speculation.base import Features
from ..speculation.decision import PROMPT
from ..speculation.draft import Draft, chain
from ..speculation.loop import Speculator

if TYPE_CHECKING:
    from .text import Text

logger = logging.getLogger("kvflash_ggml")

NAME = "pool"
"""The source of its drafts."""

Draw = Callable[[int], int]
"""What is drawn after a row of the newest step."""


class PoolDrafter:
    """Decodes a few tokens with what is in the pool in view, by the sampler of the running answer.

    It draws from a copy of that sampler, with the same random numbers: where the pool sees what the text holds, what it
    draws is what will be drawn. A sampler that calls Python cannot be copied; then the likeliest tokens are proposed.

    made: the text, weakly, since it owns this. nested: who drafts for the pool, which verifies that as
    the text is verified; None to decode token by token.
    """

    name = NAME
    wants = Features(newest=PROMPT)  # its first draft after a prompt is timed apart, but takes as long after any

    def __init__(self, made: Text, nested: Speculator | None = None) -> None:
        self._made = weakref.ref(made)
        self._nested = nested

    @property
    def able(self) -> bool:
        """Does a step see more than the pool, and is there more?"""
        sequence = self._text.sequence
        return sequence is not None and sequence.reading.answers_exactly and not sequence.sees_everything

    @property
    def _text(self) -> Text:
        text = self._made()
        assert text is not None
        return text

    def observe(self, start: int, tokens: Int32s, rows: Floats | None) -> None:
        """See `Drafter`: what the text is, the pool knows."""

    def propose(self, root: int, most: int) -> Draft | None:
        """See `Drafter`. None where a step sees no more than the pool, or everything is resident."""
        if not self.able:
            return None
        text, drawn = self._text, list[int]()
        sampler = text.sampler
        copy = None if text.greedy or sampler is None or sampler.custom_samplers else sampler.clone()
        if self._nested is not None:
            self._nested.apart()
        with SelfDraft(text.pooled, most) as draft:
            while len(drawn) < most and self._extend(draft, root, drawn, copy):
                root = drawn[-1]
        return chain(drawn, self.name) if drawn else None

    def _extend(self, text: SelfDraft, root: int, drawn: list[int], copy: Any) -> bool:
        """Compute a step of the pool, which draws a token, and one more for each that was drafted for it and is right.

        False if it was the last one: what follows could not be computed.
        """
        nested = self._nested
        draft = None if nested is None else nested.propose(text, root)
        drafted = [] if draft is None else draft.tokens.tolist()
        length = len(text.tokens)
        try:
            text.write([root, *drafted])
        except KVFlashError as err:
            if nested is None or draft is None:
                raise
            nested.refused(err)
            return False
        draw, right = self._drawing(len(drafted) + 1, drawn, copy), 0
        drawn.append(draw(0))
        while right < len(drafted) and drafted[right] == drawn[-1]:
            right += 1
            drawn.append(draw(right))
        if nested is not None and draft is None:
            nested.plain()
        elif nested is not None:
            nested.verified(range(right), len(drafted) + 1)
        return text.retain(length + 1 + right)

    def _drawing(self, rows: int, drawn: list[int], copy: Any) -> Draw:
        """Return what draws after the rows of the newest step, in order. drawn: what was before. copy: of a sampler."""
        text = self._text
        if copy is None:
            picks: list[int] = text.pooled.engine.argmax(range(rows)).tolist()
            return picks.__getitem__
        return lambda row: int(copy.sample(text.model.context, row))

    def truncate(self, length: int) -> None:
        """See `Drafter`."""

    def close(self) -> None:
        """See `Drafter`."""
