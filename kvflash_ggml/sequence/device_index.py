"""Index rows of a text on the device that computes its steps. It scores by them right behind a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ..arrays import Floats, Int32s
from ..errors import HostMemoryError
from ..policy.base import Pairs

if TYPE_CHECKING:
    from ..native.engine import PagedEngine


INDEX_SCORES = 1 << 20
"""Scores that a device computes at once, at most (KVF_INDEX_SCORES): of 24 heads 2.8 million tokens."""

INDEX_ROWS = 64
"""Queries of each head that it computes them for, at most."""


class Room(NamedTuple):
    """Bytes on a device."""

    offset: int
    size: int


def no_room() -> Room:
    return Room(0, 0)


class There(NamedTuple):
    """What a device has: index rows of the first `chunks` chunks of a text, of these `units`. version: it changes when
    rows may have become others. heads: that the newest score has asked.
    """

    version: int
    chunks: int
    units: Pairs
    heads: Pairs


class Ahead(NamedTuple):
    """Attention masses that a device computes behind a step, before a policy asks for them. there: of which rows.

    rows: queries of each head, the newest ones of the step. values: [heads * rows, chunks].
    """

    there: There
    rows: int
    values: Floats


class DeviceIndex:
    """The index rows of one text on a device, the first ones that have room.

    When a score is requested, the device computes it behind the step of the newest token, from the queries that are
    there, so that no thread has to send them. Which heads a policy will ask is not known then: it is asked for those of
    the score before. The thread that scores sends rows, and takes the result if it is what the policy asks for.

    row_bytes: of a policy's index row, 0 for a policy without an index. known: what was there at the newest score that
    is used: what the other thread does meanwhile never decides what is computed where.
    """

    def __init__(self, engine: PagedEngine, room: Callable[[], Room]) -> None:
        self.row_bytes = 0
        self.known: There | None = None
        self._engine = engine
        self._room = room
        # by the thread that scores:
        self.there: There | None = None
        self._version = 0
        self._sent = 0

    # --- the thread that computes steps

    def begin(self, rows: Int32s, n_chunks: int, room: Callable[[int], Floats]) -> Ahead | None:
        """Compute masses of the first chunks for the captured queries in these rows, the oldest first. They are there
        once a later transfer is done. room: returns page-locked room for so many floats, or raises HostMemoryError.
        """
        known = self.known
        if known is None or not 0 < len(rows) <= INDEX_ROWS:
            return None
        columns = len(known.heads) * len(rows)
        count = min(known.chunks, n_chunks, INDEX_SCORES // columns)
        if count <= 0:
            return None
        try:
            values = room(columns * count).reshape(columns, count)
        except HostMemoryError:
            return None  # other room would have to be waited for
        self._engine.score_device_index(known.units, known.heads, self._room().offset, count, rows, values)
        return Ahead(known, len(rows), values)

    def cut(self, n_chunks: int) -> None:
        """Note that other chunks will follow the first `n_chunks`."""
        if self.known is not None:
            self.known = self.known._replace(chunks=min(self.known.chunks, n_chunks))

    def on_host(self, n_chunks: int) -> int:
        """Return how many of the first `n_chunks` chunks the host scores: those that the device has no room for."""
        return max(0, n_chunks - self._room().size // self.row_bytes) if self.row_bytes else n_chunks

    # --- the thread that scores

    def take(self, ahead: Ahead | None, units: Pairs, heads: Pairs, rows: int) -> Floats:
        """Return the masses of the first chunks for the newest `rows` queries, [heads * rows, chunks]; of none if what
        was computed is not that.
        """
        nothing = np.empty((len(heads) * rows, 0), np.float32)
        if ahead is None or ahead.there.version != self._version or rows > ahead.rows:
            return nothing
        if not (np.array_equal(units, ahead.there.units) and np.array_equal(heads, ahead.there.heads)):
            return nothing
        newest = ahead.values.reshape(len(heads), ahead.rows, -1)[:, -rows:]
        return newest.reshape(len(heads) * rows, -1)

    def send(self, addresses: npt.NDArray[np.uint64], size: int, units: Pairs, heads: Pairs) -> None:
        """Copy the rows at these addresses to the device, as far as they have room and are not there."""
        room = self._room()
        count = min(len(addresses), room.size // size)
        if self._sent < count:
            self._engine.put_index(room.offset + self._sent * size, addresses[self._sent : count], size)
            self._sent = count
        self.there = There(self._version, self._sent, units, heads)

    def truncate(self, n_chunks: int) -> None:
        """Forget the rows from `n_chunks` on."""
        self._sent = min(self._sent, n_chunks)
        if self.there is not None:  # a score that asks for no row tells of it once more
            self.there = self.there._replace(chunks=min(self.there.chunks, n_chunks))

    def renew(self) -> None:
        """Note that all rows are others."""
        self._sent, self._version = 0, self._version + 1
