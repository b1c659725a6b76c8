"""The base of drafters with a context of their own: pending tokens, and saved state."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..arrays import Floats, Int32s
from ..errors import SnapshotError
from ..snapshot.fingerprint import ModelFile
from ..state.blob import Bytes
from ..state.session import Origin, SavedDraft

if TYPE_CHECKING:
    from .context import DraftContext

_NO_ROWS = np.empty((0, 1), np.float32)


class PendingTokens:
    """The newest tokens of a text that a drafter has not read, at most `max_tokens`, and their rows."""

    start: int
    _tokens: Int32s
    _rows: list[Floats]

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.reset(0)

    @property
    def end(self) -> int:
        """The length of the text."""
        return self.start + len(self._tokens)

    def add(self, start: int, tokens: Int32s, rows: Floats | None = None) -> None:
        """Append tokens from position `start` on; older tokens from there on are void. Rows are copied."""
        if start > self.end:
            self.reset(start)
        self.truncate(start)
        kept = slice(max(0, len(tokens) - self._max_tokens), None)
        self._tokens = np.concatenate([self._tokens, np.asarray(tokens[kept], np.int32)])
        if rows is not None:
            self._rows.append(np.array(rows[kept], np.float32))
        self.start = start + len(tokens) - len(self._tokens)
        self._trim()

    def take(self) -> tuple[int, Int32s, Floats | None]:
        """Return the first position, the tokens, and their rows if there are any. None are pending then."""
        start, tokens = self.start, self._tokens
        rows = np.concatenate(self._rows) if self._rows else None
        self.reset(self.end)
        return start, tokens, rows

    def truncate(self, length: int) -> None:
        """Cut the text to `length` tokens."""
        if length <= self.start:
            self.reset(length)
        elif length < self.end:
            count = length - self.start
            self._tokens = self._tokens[:count]
            self._rows = [np.concatenate(self._rows)[:count]] if self._rows else []

    def reset(self, length: int) -> None:
        """Drop all pending tokens of a text of `length` tokens."""
        self.start = length
        self._tokens = np.empty(0, np.int32)
        self._rows = []

    def _trim(self) -> None:
        over = len(self._tokens) - self._max_tokens
        if over <= 0:
            return
        self._tokens = self._tokens[over:]
        self.start += over
        while self._rows and len(self._rows[0]) <= over:
            over -= len(self._rows.pop(0))
        if self._rows and over:
            self._rows[0] = self._rows[0][over:]


class ModelDrafter:
    """The base of drafters with a model of their own. They read the text when a draft is wanted, all at once.

    path: the model's file, which has just been loaded. own: whatever the drafter holds, its context included; closed
    with it. place: where the context has the token at position p: 0 for p, -1 for p - 1.
    """

    name: str

    def __init__(self, path: Path, context: DraftContext, own: ExitStack, *, place: int = 0) -> None:
        self._context = context
        self._file = ModelFile(path)
        self._pending = PendingTokens(context.window)
        self._place = place
        self._stack = own

    def truncate(self, length: int) -> None:
        self._pending.truncate(length)
        self._context.truncate(max(0, length + self._place))

    def state(self) -> SavedDraft | None:
        self._read()
        return self._saved()

    def load(self, saved: SavedDraft) -> None:
        self._restore(saved)

    def close(self) -> None:
        self._stack.close()

    def _read(self) -> None:
        """Evaluate the pending tokens: by rows of the target where there are any, else by the tokens."""
        start, tokens, rows = self._pending.take()
        self._context.truncate(start)
        self._context.feed(start, tokens if rows is None else None, rows)

    def _saved(self, rows: Floats = _NO_ROWS) -> SavedDraft | None:
        """Return the state of the context and `rows` [n, width]; None if the context does not end where the text ends.

        Nothing may be pending. SnapshotError if the model's file was replaced.
        """
        context, length = self._context, self._pending.end
        if context.first == context.end or context.end != length + self._place:
            return None
        return SavedDraft(
            origin=self._origin(),
            length=length,
            first=context.first,
            end=context.end,
            context=Bytes(context.state()),
            rows=Bytes(np.ascontiguousarray(rows, np.float32).tobytes()),
        )

    def _restore(self, saved: SavedDraft, width: int = 1) -> Floats:
        """Put a saved state in place and return its rows [n, width]. SnapshotError, and an empty context, if it does
        not fit.
        """
        context = self._context
        context.reset()
        if saved.origin != self._origin():
            raise SnapshotError("it was saved by another drafter file, or with another window")
        if saved.rows.size % (4 * width) or saved.end != saved.length + self._place:
            raise SnapshotError("its sizes contradict each other")
        rows = np.frombuffer(saved.rows.read(), np.float32).reshape(-1, width)
        if len(rows) > saved.length or not np.isfinite(rows).all():
            raise SnapshotError("its rows are damaged")
        context.load(saved.first, saved.end, bytes(saved.context.read()))
        if context.first == context.end:
            raise SnapshotError("llama.cpp does not take it")
        self._pending.reset(saved.length)
        return rows

    def _origin(self) -> Origin:
        return Origin(self.name, self._file.identity(), self._context.window, self._context.types)
