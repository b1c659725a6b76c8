"""Copies of recurrent state and windows to which a text can roll back, and how much survives a lost device."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from ..constants import CHUNK
from ..errors import DeviceLost, SnapshotError
from ..host.store import HostStore
from ..pool.page_table import PageTable
from ..state.blob import Blob, Bytes
from .copies import StateCopies

if TYPE_CHECKING:
    from ..native.engine import PagedEngine


logger = logging.getLogger("kvflash_ggml")


class Checkpoints:
    """At most `max_count` states by position. Taken between steps only: splitting a step would change its rounding."""

    def __init__(self, engine: PagedEngine, seq: int, *, max_count: int, n_ctx: int) -> None:
        self._engine = engine
        self._seq = seq
        self._max_count = max_count if engine.info.recurrent or engine.info.n_swa > 0 else 0
        # half of them along a prompt; the others for its end, where texts continue
        self._step = max(8192, 2 * n_ctx // max(1, max_count))
        self.copies = StateCopies(engine, seq)
        self._states: dict[int, Blob] = {}
        self.restored: tuple[int, Blob] | None = None
        """The position and state that were put back, while no step has followed: the state need not be read again."""

    def before_step(self, pos: int, *, wanted: bool) -> None:
        """Keep a state of the text of `pos` tokens, before a step of a prompt, if it is due. wanted: rolling back to
        here is likely.
        """
        restored, self.restored = self.restored, None
        newest = max(self._states, default=0)
        if self._max_count == 0 or pos == newest:
            return
        if wanted or pos - newest >= self._step:
            if len(self._states) >= self._max_count:
                del self._states[self._cheapest()]
            if restored is not None and restored[0] == pos:
                self._states[pos] = restored[1]
            else:
                self._states[pos] = self.copies.copy()

    def state(self) -> dict[int, Blob]:
        """Return all states by position, to be loaded later."""
        return dict(self._states)

    def at(self, length: int) -> Blob:
        """Return a copy of the present state in memory, at the end of a text of `length` tokens.

        It returns the state that was kept or put back there, if nothing was evaluated since: a state of a large model
        takes tens of milliseconds to read. A sliding window is always read: rejected rows may lie elsewhere in it.
        """
        if self._engine.info.n_swa == 0:
            restored = self.restored
            kept = restored[1] if restored is not None and restored[0] == length else self._states.get(length)
            if isinstance(kept, Bytes):
                return kept
        return self.copies.copy()

    def load(self, states: Mapping[int, Blob], length: int, state: Blob) -> None:
        """Take over the states of a restored text, or the newest of them. state: at its end, `length`."""
        self.restored = (length, state) if self._max_count else None
        newest = sorted(states)[-self._max_count :] if self._max_count else []
        self._states = {pos: states[pos] for pos in newest}

    def _cheapest(self) -> int:
        """Return the position whose loss costs the fewest tokens to read again. The newest state stays."""
        places = [0, *sorted(self._states)]
        again = {b: b - a for a, b in pairwise(places[:-1])}
        return min(again, key=again.__getitem__, default=places[-1])

    def truncate(self, length: int) -> None:
        """Drop the states beyond `length`, where the text was cut."""
        self._states = {pos: data for pos, data in self._states.items() if 0 < pos <= length}
        self.restored = None

    def nearest(self, pos: int) -> int:
        """Return the position of the newest state at or before `pos`, or 0."""
        return max((at for at in self._states if at <= pos), default=0)

    def rewind_to(self, pos: int) -> int:
        """Roll back to the newest state at or before `pos`, or to the beginning. Returns its position."""
        self.truncate(pos)
        at = max(self._states, default=0)
        if at == 0:
            self._engine.clear(seq=self._seq)
            return 0
        try:
            self.copies.put(self._states[at], self._engine.end(at, seq=self._seq))
            if self._engine.truncate(at, seq=self._seq):
                return at
        except SnapshotError as err:
            logger.warning("the checkpoint at %d cannot be restored: %s", at, err)
        # a half restored state may not be continued
        self._states.clear()
        self._engine.clear(seq=self._seq)
        return 0


@dataclass(frozen=True, slots=True)
class Recovery:
    """Tells how much of a text can be recovered. It asks no device for anything."""

    engine: PagedEngine
    table: PageTable
    store: HostStore
    checkpoints: Checkpoints

    @property
    def kept(self) -> int:
        """Leading tokens that can be recovered: tokens of sealed chunks whose images were read while all servers
        answered.

        For recurrent state and windows, the tokens before the newest checkpoint among them.
        """
        sealed = self.table.length // CHUNK
        length = next((c for c in range(sealed) if not self._is_sound(c)), sealed) * CHUNK
        info = self.engine.info
        return self.checkpoints.nearest(length) if info.recurrent or info.n_swa else length

    def _is_sound(self, chunk: int) -> bool:
        return chunk in self.store and self.engine.is_sound(self.store.page(chunk).filled)

    def check(self) -> None:
        """Raise DeviceLost if a server no longer answers. No server is asked once the model is closed."""
        if self.engine.is_lost:
            with self.told():
                self.engine.check_lost()

    @contextmanager
    def told(self) -> Iterator[None]:
        """Add to a DeviceLost that is raised meanwhile how much is kept."""
        try:
            yield
        except DeviceLost as err:
            self.tell(err)
            raise

    def tell(self, err: DeviceLost) -> None:
        """Add to the error how much is kept."""
        err.kept = self.kept
