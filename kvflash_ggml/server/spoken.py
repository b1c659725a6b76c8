"""One answer on its way to a client: its pieces are read a few at once, as content, reasoning and calls."""

from __future__ import annotations

import time

from ..batching.messages import Event, Finished, Piece
from ..chat.reader import AnswerReader
from ..chat.values import Delta, Said

AT_ONCE = 16
WITHIN_S = 0.05
"""An answer is parsed as a whole each time: for so many pieces, or after so long."""


class Spoken:
    """For one answer: either `deltas` of each event, or `keep` each event and ask for the `whole`."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self._held: list[str] = []
        self._parsed = 0.0

    @property
    def calls(self) -> bool:
        """Has it called a function, and was it understood to its end?"""
        return bool(self._reader.said.calls) and not self._reader.odd

    def deltas(self, event: Event) -> list[Delta]:
        """What is new with this event."""
        if isinstance(event, Piece):
            self._held.append(event.text)
            if len(self._held) < AT_ONCE and time.monotonic() - self._parsed < WITHIN_S:
                return []
        elif not isinstance(event, Finished):
            return []
        return self._push(end=isinstance(event, Finished))

    def keep(self, event: Event) -> None:
        if isinstance(event, Piece):
            self._held.append(event.text)

    def whole(self) -> Said:
        self._push(end=True)
        return self._reader.said

    def _push(self, *, end: bool) -> list[Delta]:
        text, self._held, self._parsed = "".join(self._held), [], time.monotonic()
        return self._reader.push(text, end=end)
