"""A drafter that knows what comes: it drafts a recorded text, as well as it is told to. For measurements and tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from kvflash_ggml.arrays import Floats, Int32s
from kvflash_ggml.speculation.base import Features
from kvflash_ggml.speculation.draft import Draft, chain


class Oracle:
    """Proposes what a recorded text has at the place of the root, and some of it wrong.

    text: the whole text, prompt included. rates: the probability that a token is right where those before it were, for
    each position of a draft; the last one counts for all that follow. n_vocab: wrong tokens are other ids below it.
    Which ones are wrong depends on seed and place alone, counted from `origin` on, so the same place is drafted the
    same way again. seconds: a proposal takes so long. serial: so long for each token of it. sleep: how that time is
    spent.
    """

    name = "oracle"
    wants = Features()

    def __init__(
        self,
        text: Int32s,
        rates: Sequence[float],
        *,
        n_vocab: int,
        seed: int = 0,
        origin: int = 0,
        seconds: float = 0.0,
        serial: bool = False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._text = np.asarray(text, np.int32)
        self._rates = np.asarray(rates, np.float64)
        self._n_vocab = n_vocab
        self._seed, self._origin = seed, origin
        self._seconds = seconds
        self._serial = serial
        self._sleep = sleep
        self._length = 0

    def observe(self, start: int, tokens: Int32s, rows: Floats | None) -> None:
        """See `Drafter`."""
        self._length = start + len(tokens)

    def propose(self, root: int, most: int) -> Draft | None:
        """See `Drafter`. Nothing where the text is over, or the root is not the recorded one."""
        at = self._length
        if at >= len(self._text) or self._text[at] != root:
            return None
        tokens = self._text[at + 1 : at + 1 + max(0, most)].copy()
        if not len(tokens):
            return None
        if self._seconds:
            self._sleep(self._seconds * (len(tokens) if self._serial else 1))
        draws = np.random.default_rng((self._seed, max(0, at - self._origin))).random((2, len(tokens)))
        rates = self._rates[np.minimum(np.arange(len(tokens)), len(self._rates) - 1)]
        wrong = draws[0] >= rates
        other = 1 + (draws[1] * (self._n_vocab - 1)).astype(np.int32)
        tokens[wrong] = ((tokens + other) % self._n_vocab)[wrong]
        return chain(tokens, self.name)

    def truncate(self, length: int) -> None:
        """See `Drafter`."""
        self._length = min(self._length, length)

    def close(self) -> None:
        """See `Drafter`."""


def rates_of(tokens: float, most: int) -> float:
    """The rate of every position with which steps that draft `most` tokens win so many on average, 1 to most + 1."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        won = float(np.sum(middle ** np.arange(most + 1)))
        low, high = (middle, high) if won < tokens else (low, middle)
    return high
