"""Drafters that go on from what the target knew before a token, a step for each: MTP heads and EAGLE3."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..arrays import Floats, Int32s
from ..sequence.prefill import LEFT_OVER, QUESTION_TOKENS
from ..state.draft import SavedDraft
from .base import Features
from .context import DraftContext
from .draft import Draft, chain
from .model_drafter import ModelDrafter
from .target import Target

RECENT = QUESTION_TOKENS + LEFT_OVER + 1
"""Rows that are kept for a text that is cut, as it is where the end of a prompt is read again: what follows a cut needs
the row of the last token that stays."""

_OUTPUTS = 32  # so many tokens are read in the step that drafts, for more their logits would cost too much


def go_on(
    context: DraftContext, target: Target, at: int, tokens: Int32s, states: Floats | None = None, *,
    most: int, source: str,
) -> Draft:  # fmt: skip
    """What follows these tokens, the first at `at`: the likeliest one each time, up to `most` or an end of generation.

    states: what each goes on from, for a graph that takes them and gives the next one; None for a model that reads a
    text by itself. It ends before a token that the target does not have.
    """
    found, logps = list[int](), list[float]()
    while len(found) < most:
        context.run(at, tokens, states, outputs=1 if states is None else len(tokens))
        ids, logp = context.top([len(tokens) - 1], 1)
        if ids[0, 0] >= target.n_vocab:
            break
        found.append(int(ids[0, 0]))
        logps.append(float(logp[0, 0]))
        if found[-1] in target.ends:
            break
        if states is not None and len(found) < most:
            states = context.states(len(tokens))[-1:]
        at, tokens = context.end, ids[0]
    return chain(found, source, np.array(logps, np.float32))


class Chained(ModelDrafter):
    """Reads pairs: a token, and what the target computed for the one before it. Then each token it drafts with its own.

    path: of its file. own: what it holds, its context first; closed with it. place: where the pair of the token at p
    stands, 0 for p and -1 for p - 1. state: makes what a pair has of what was observed, [n, width] to [n, state].
    """

    def __init__(
        self, name: str, wants: Features, target: Target, path: Path, context: DraftContext, own: ExitStack, *,
        width: int, place: int, state: Callable[[Floats], Floats] = lambda rows: rows,
    ) -> None:  # fmt: skip
        self.name = name
        self.wants = replace(wants, newest=context.window + 1)  # a pair has what belongs to the token before it
        super().__init__(path, context, own)
        self._target = target
        self._place = place
        self._state = state
        self._recent = np.empty((0, width), np.float32)  # of the newest tokens
        self._length = 0

    def observe(self, start: int, tokens: Int32s, rows: Floats | None) -> None:
        """See Drafter. Without rows of these tokens it starts anew behind them."""
        self.truncate(start)
        if start != self._length or rows is None:  # a gap
            self._recent = self._recent[:0]
        self._length = start + len(tokens)
        if rows is None:
            self._lag.reset(self._length)
        elif len(tokens):
            before = self._recent[-1:] if len(self._recent) else np.zeros_like(rows[:1])
            self._lag.add(start, tokens, np.concatenate([before, rows[:-1]]))
            self._recent = np.concatenate([self._recent, rows])[-RECENT:]

    def propose(self, root: int, most: int) -> Draft | None:
        """See Drafter. DecodeError if what it computes are no numbers."""
        if not len(self._recent):
            return None  # what the target knew before the root is not known
        at, tokens, rows = self._unread()
        states = self._state(np.concatenate([rows, self._recent[-1:]]))
        tokens = np.append(tokens, np.int32(root))
        end = self._length + self._place
        if len(tokens) > _OUTPUTS:
            self._context.feed(at, tokens[:-1], states[:-1])
            at, tokens, states = end, tokens[-1:], states[-1:]
        draft = go_on(self._context, self._target, at, tokens, states, most=most, source=self.name)
        self._context.truncate(end)
        return draft

    def truncate(self, length: int) -> None:
        """See Drafter. The newest rows outlive it."""
        self._lag.truncate(length)
        self._context.truncate(max(0, length + self._place))
        if length < self._length:
            stay = max(0, len(self._recent) - (self._length - length))
            self._recent = self._recent[:stay]
            self._length = length

    def state(self) -> SavedDraft | None:
        """See Remembering."""
        at, tokens, rows = self._unread()
        if len(tokens):
            self._context.feed(at, tokens, self._state(rows))
        return self._memory.state(self._length, self._recent, place=self._place)

    def load(self, saved: SavedDraft) -> None:
        """See Remembering."""
        self._recent = self._memory.load(saved, self._recent.shape[1], place=self._place)[-RECENT:]
        self._lag.reset(saved.length)
        self._length = saved.length

    def _unread(self) -> tuple[int, Int32s, Floats]:
        """The pairs that lag behind the text, and where the first stands. They are taken: the context ends there."""
        start, tokens, rows = self._lag.take()
        kept = slice(max(0, -(start + self._place)), None)  # no pair stands before the text
        at = start + kept.start + self._place
        self._context.truncate(at)
        return at, tokens[kept], self._recent[:0] if rows is None else rows[kept]
