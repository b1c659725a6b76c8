"""What a drafter with a context of its own knows of a text, as a value."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..arrays import Floats
from ..errors import SnapshotError
from ..snapshot.fingerprint import ModelFile
from ..state.blob import Bytes
from ..state.draft import Origin, SavedDraft
from .context import DraftContext, SavedContext

_NO_ROWS = np.empty((0, 1), np.float32)


class DraftMemory:
    """Puts a drafter's context aside, and back where it is of the same origin.

    name: of the drafter. path: of its file, which has just been loaded.
    """

    def __init__(self, name: str, path: Path, context: DraftContext) -> None:
        self._name = name
        self._file = ModelFile(path)
        self._context = context

    def state(self, length: int, rows: Floats = _NO_ROWS, *, place: int = 0) -> SavedDraft | None:
        """What it holds of a text of `length` tokens, None if that is nothing. SnapshotError if its file was replaced.

        rows: what else is kept, [n, width]. place: where the context stands for a token, before its own position.
        """
        context = self._context
        if context.first == context.end or context.end != length + place:
            return None
        origin, held = self._origin(), context.state()
        return SavedDraft(
            origin=origin,
            length=length,
            first=held.first,
            end=held.end,
            context=Bytes(held.data),
            rows=Bytes(np.ascontiguousarray(rows, np.float32).tobytes()),
        )

    def load(self, saved: SavedDraft, width: int = 1, *, place: int = 0) -> Floats:
        """Hold what was put aside. Returns the rows, [n, width].

        SnapshotError, and nothing held, if it does not fit.
        """
        context = self._context
        context.reset()
        if saved.origin != self._origin():
            raise SnapshotError("another file has drafted, or with another window")
        if saved.rows.size % (4 * width) or saved.end != saved.length + place:
            raise SnapshotError("it cannot be as it says")
        rows = np.frombuffer(saved.rows.read(), np.float32).reshape(-1, width)
        if len(rows) > saved.length or not np.isfinite(rows).all():
            raise SnapshotError("it cannot be as it says")
        context.load(SavedContext(saved.first, saved.end, bytes(saved.context.read())))
        if context.first == context.end:
            raise SnapshotError("llama.cpp does not take it")
        return rows

    def _origin(self) -> Origin:
        return Origin(self._name, self._file.identity(), self._context.window, self._context.types)
