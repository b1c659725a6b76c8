"""Recurrent state as it was before draft rows: kept on the device, or on the host where the device has no room."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..arrays import Buffer
from ..errors import HostMemoryError

if TYPE_CHECKING:
    from ..native.engine import Engine


logger = logging.getLogger("kvflash_ggml")


@dataclass(frozen=True, slots=True, eq=False)
class SavedState:
    """copy: the state on the host; None if the device keeps it, until the device keeps another one."""

    copy: Buffer | None


class DeviceStates:
    """Saves states of an engine, and puts them back. A device keeps one state of each sequence."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._on_host = False
        self._newest: dict[int, SavedState] = {}

    def keep(self, seq: int) -> SavedState:
        """Save the present state of a sequence. On a device nothing waits for it."""
        if not self._on_host:
            try:
                self._newest.pop(seq, None)
                self._engine.keep_state(seq=seq)
                self._newest[seq] = kept = SavedState(None)
                return kept
            except HostMemoryError as err:
                self._on_host = True  # for good: another try at each draft would take time
                logger.warning("recurrent state goes to the host and back at each draft that needs it: %s", err)
        return SavedState(self._engine.get_state(seq=seq))

    def put(self, kept: SavedState, length: int, seq: int) -> None:
        """Put back the state of a sequence of `length` tokens, as often as needed. On SnapshotError there is no
        state.
        """
        end = self._engine.end(length, seq=seq)
        if kept.copy is not None:
            self._engine.set_state(kept.copy, end, seq=seq)
            return
        assert kept is self._newest.get(seq), "the device keeps another state by now"
        self._engine.put_state(end, seq=seq)
