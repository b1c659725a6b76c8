"""A change that has begun is brought to its end, whatever interrupts it."""

from __future__ import annotations

from collections.abc import Callable


class Unfinished:
    """Holds what would complete, or take back, the change that is under way: work that can be done over and over.

    An interrupt can come between any two statements. So a change says first what would settle it, then acts, and
    whoever comes next settles what is left.
    """

    def __init__(self) -> None:
        self._work: Callable[[], None] | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """From here on `work` has to be done, in place of what was to be done before."""
        self._work = work

    def end(self) -> None:
        """Nothing has to be done any more."""
        self._work = None

    def settle(self) -> None:
        """Do what has to be done, if anything. Interrupted, it is done all the same before the interrupt goes on."""
        if self._work is None:
            return
        try:
            self._work()
        except Exception:
            self._work = None  # it would fail again
            raise
        except BaseException:
            self._work()
            self._work = None
            raise
        self._work = None
