"""What a drafter was told of the text and has not read yet: it is read when a draft is wanted, all at once."""

from __future__ import annotations

import numpy as np

from ..arrays import Floats, Int32s


class Lag:
    """The newest tokens of a text, at most `most`, and the rows that belong to them."""

    start: int
    _tokens: Int32s
    _rows: list[Floats]

    def __init__(self, most: int) -> None:
        self._most = most
        self.reset(0)

    @property
    def end(self) -> int:
        """The length of the text."""
        return self.start + len(self._tokens)

    def add(self, start: int, tokens: Int32s, rows: Floats | None = None) -> None:
        """These follow, from position `start` on; what was there is void. Rows are copied."""
        if start > self.end:
            self.reset(start)
        self.truncate(start)
        kept = slice(max(0, len(tokens) - self._most), None)
        self._tokens = np.concatenate([self._tokens, np.asarray(tokens[kept], np.int32)])
        if rows is not None:
            self._rows.append(np.array(rows[kept], np.float32))
        self.start = start + len(tokens) - len(self._tokens)
        self._trim()

    def take(self) -> tuple[int, Int32s, Floats | None]:
        """The position of the first, the tokens, and their rows if there are any; nothing lags then."""
        start, tokens = self.start, self._tokens
        rows = np.concatenate(self._rows) if self._rows else None
        self.reset(self.end)
        return start, tokens, rows

    def truncate(self, length: int) -> None:
        """The text ends after `length` tokens."""
        if length <= self.start:
            self.reset(length)
        elif length < self.end:
            count = length - self.start
            self._tokens = self._tokens[:count]
            self._rows = [np.concatenate(self._rows)[:count]] if self._rows else []

    def reset(self, length: int) -> None:
        """Nothing lags of a text of this length."""
        self.start = length
        self._tokens = np.empty(0, np.int32)
        self._rows = []

    def _trim(self) -> None:
        over = len(self._tokens) - self._most
        if over <= 0:
            return
        self._tokens = self._tokens[over:]
        self.start += over
        while self._rows and len(self._rows[0]) <= over:
            over -= len(self._rows.pop(0))
        if self._rows and over:
            self._rows[0] = self._rows[0][over:]
