"""Lines that are logged once, where a user would wonder: a prompt that takes long, and cores that others use too."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from threading import get_ident

from .. import system
from ..logs import Progress, warn_once

logger = logging.getLogger("kvflash_ggml")

PATIENCE_S = 5.0
"""Seconds that a prompt is read without a word."""

_ENOUGH_NS = 2_000_000_000
_BUSY = 0.3


class SlowPrompt:
    """Tells once how far a prompt is, if it takes long and nobody else is told its progress. clock: in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = 0.0
        self._told = False

    def begin(self) -> Progress | None:
        """Return what is called as (done, total) while a prompt is read from now on; None once a line was logged."""
        self._began = self._clock()
        return None if self._told else self._report

    def _report(self, done: int, total: int) -> None:
        took = self._clock() - self._began
        if self._told or took < PATIENCE_S or done >= total:
            return
        self._told = True
        logger.warning(
            "kvflash: reading a prompt: %s of %s tokens in %.0f s. kvflash_progress=... is called after each step;"
            " docs/troubleshooting.md, 'A long prompt on a CPU', has faster settings",
            f"{done:,}", f"{total:,}", took,
        )  # fmt: skip


class SharedCores:
    """Warns once if the thread that computes has waited long for a core. threads: that compute a step.

    times: as `system.core_times`, nanoseconds that the calling thread ran, and waited for a core.
    """

    def __init__(self, threads: int, times: Callable[[], tuple[int, int] | None] = system.core_times) -> None:
        self._threads = threads
        self._times = times

    def begin(self) -> tuple[int, tuple[int, int] | None]:
        """Return what `end` must be given after the work."""
        return get_ident(), self._times()

    def end(self, began: tuple[int, tuple[int, int] | None]) -> None:
        thread, before = began
        now = self._times()
        if self._threads < 2 or thread != get_ident() or before is None or now is None:
            return
        ran, waited = now[0] - before[0], now[1] - before[1]
        if ran + waited >= _ENOUGH_NS and waited >= _BUSY * (ran + waited):
            warn_once(
                f"other programs use these cores too: a thread that computes waited for one {_BUSY:.0%} of its time, or"
                f" more. {self._threads} threads wait for each other: give fewer (n_threads, -t), or set"
                " OMP_WAIT_POLICY=passive before the start"
            )
