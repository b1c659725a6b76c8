"""Log probabilities of tokens, of one that was drawn and of all tokens of a prompt."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ..arrays import Int32s
from .messages import Logprob

Row = npt.NDArray[np.single]
"""Logits [n_vocab]."""


def logprob_of(token: int, row: Row, top: int, piece: Callable[[int], bytes]) -> Logprob:
    """Return the log probability of a token, and those of the `top` likeliest tokens. piece: the bytes of a token."""
    highest = row.max()
    total = float(highest) + float(np.log(np.exp(row - highest).sum(dtype=np.float64)))
    if top == 1:  # ten times as fast in a large vocabulary, and what measuring programs ask for
        best = np.array([row.argmax()])
    else:
        best = np.argpartition(-row, top)[:top] if 0 < top < len(row) else np.empty(0, np.intp)
        best = best[np.argsort(-row[best], kind="stable")]
    alternatives = tuple((one, piece(one), float(row[one]) - total) for one in best.tolist())
    return Logprob(token=token, piece=piece(token), logprob=float(row[token]) - total, top=alternatives)


class PromptLogprobs:
    """Collects the log probabilities of a prompt's tokens while it is read: of each step only what is told is kept.

    tokens: the prompt. top: how many alternatives are told of each token. piece: the bytes of a token.
    """

    def __init__(self, tokens: Int32s, top: int, piece: Callable[[int], bytes]) -> None:
        self._tokens: list[int] = tokens.tolist()
        self._top = top
        self._piece = piece
        first = Logprob(token=self._tokens[0], piece=piece(self._tokens[0]), logprob=None)
        self._told = {0: first}

    def take(self, start: int, rows: npt.NDArray[np.single]) -> None:
        """Take the logits [count, n_vocab] of a step whose first token is at `start`. A repeated step counts."""
        for at, row in enumerate(rows[: len(self._tokens) - 1 - start], start + 1):
            self._told[at] = logprob_of(self._tokens[at], row, self._top, self._piece)

    def all(self) -> tuple[Logprob, ...]:
        """Return those of all tokens, in their order."""
        return tuple(self._told[at] for at in range(len(self._tokens)))
