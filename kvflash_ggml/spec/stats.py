"""`llm.kvflash.spec`: what drafts have won."""

from __future__ import annotations

from copy import deepcopy

from .loop import Speculator
from .tally import Tally


class SpecStats:
    """A read-only view. Counters are in `total`, and of the newest request in `last`: copies, as they stand."""

    def __init__(self, speculator: Speculator) -> None:
        self._speculator = speculator

    def __repr__(self) -> str:
        return f"<drafts by {', '.join(self.types) or 'nobody'}: {self.total}>"

    @property
    def types(self) -> tuple[str, ...]:
        """Who is asked for drafts, in this order."""
        return self._speculator.types

    @property
    def off(self) -> str | None:
        """Why nothing is drafted any more; None while something may be."""
        return self._speculator.off

    @property
    def speedup(self) -> float | None:
        """Estimated: how many times faster than plain decoding the newest answer is.

        None before that is known, and where the width is fixed.
        """
        return self._speculator.controls.speedup

    @property
    def excess(self) -> float:
        """Seconds that drafts have cost the newest answer beyond what they won, below 0 if they won."""
        return self._speculator.controls.excess

    @property
    def idle(self) -> str | None:
        """Why the last step verified nothing; None if it did."""
        return self._speculator.controls.off

    @property
    def on_pool(self) -> SpecStats | None:
        """The same of drafts that the pool has verified, where it drafts for a lossless answer and others for it."""
        nested = self._speculator.nested
        return None if nested is None else SpecStats(nested)

    @property
    def total(self) -> Tally:
        """Since the model was loaded."""
        return deepcopy(self._speculator.total)

    @property
    def last(self) -> Tally:
        """Of the newest request."""
        return deepcopy(self._speculator.last)
