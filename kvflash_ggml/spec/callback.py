"""A drafter of llama-cpp-python's kind: a function from a text to tokens that may follow it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays import Floats, Int32s
from ..errors import DraftError
from .base import Features
from .draft import Draft, chain


class Callback:
    """Asks a `LlamaDraftModel`, or anything that can be called so."""

    name = "draft_model"
    wants = Features()

    def __init__(self, model: Callable[[Int32s], Any]) -> None:
        self._model = model
        self._text = np.empty(0, np.int32)
        self._length = 0

    def observe(self, start: int, tokens: Int32s, rows: Floats | None) -> None:
        """See `Drafter`."""
        end = start + len(tokens)
        if end >= len(self._text):
            self._text = np.resize(self._text, 2 * end + 1) if end else self._text
        self._text[start:end] = tokens
        self._length = end

    def propose(self, root: int, most: int) -> Draft | None:
        """See `Drafter`. DraftError where it returns what are no token ids."""
        text = np.append(self._text[: self._length], np.int32(root)).astype(np.intc)
        proposed = np.asarray(self._model(text))
        if proposed.size == 0:
            return None
        with np.errstate(invalid="ignore"):  # what is no number is not what it was cast to
            whole = proposed.astype(np.int32) if proposed.dtype.kind in "iuf" and proposed.ndim == 1 else None
        if whole is None or not np.array_equal(whole, proposed):
            raise DraftError(f"{self.name}: tokens must be a list of whole numbers, not {proposed!r}")
        return chain(whole[:most], self.name)

    def truncate(self, length: int) -> None:
        """See `Drafter`."""
        self._length = min(self._length, length)

    def close(self) -> None:
        """See `Drafter`."""
