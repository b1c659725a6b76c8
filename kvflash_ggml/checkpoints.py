"""Copies of what is not pooled (recurrent state, sliding windows): a text can be cut where they cannot go back."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from .errors import StateError

if TYPE_CHECKING:
    from .native.engine import Engine


logger = logging.getLogger("kvflash_ggml")


class Checkpoints:
    """At most `most` states by position. Taken between steps only: splitting a step would change its rounding."""

    def __init__(self, engine: Engine, *, most: int, n_ctx: int) -> None:
        self._engine = engine
        self._most = most if engine.info.recurrent or engine.info.n_swa > 0 else 0
        self._step = max(8192, n_ctx // max(1, most))
        self._states: dict[int, bytes] = {}

    def before_step(self, pos: int, *, last: bool) -> None:
        """The text has `pos` tokens and a step of a prompt follows, perhaps its last."""
        newest = max(self._states, default=0)
        if self._most == 0 or pos == newest:
            return
        if last or pos - newest >= self._step:
            if len(self._states) >= self._most:
                del self._states[min(self._states)]
            self._states[pos] = self._engine.get_state()

    def forget(self, *, after: int) -> None:
        """The text has been cut: states of what came later are void."""
        self._states = {pos: data for pos, data in self._states.items() if 0 < pos <= after}

    def restore(self, pos: int) -> int:
        """Go back to the newest state at or before `pos`, or to the beginning. Returns where that is."""
        self.forget(after=pos)
        at = max(self._states, default=0)
        if at == 0:
            self._engine.clear()
            return 0
        try:
            self._engine.set_state(self._states[at])
            if self._engine.truncate(at):
                return at
        except StateError as err:
            logger.warning("the checkpoint at %d cannot be restored: %s", at, err)
        # what is half restored may not be continued
        self._states.clear()
        self._engine.clear()
        return 0
