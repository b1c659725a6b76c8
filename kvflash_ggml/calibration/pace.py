"""How long a calibration will take, going by what has been done."""

from __future__ import annotations

import time


class Pace:
    """The first step does not count: it makes ready what all others find. step: tokens that a step has."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._began: tuple[float, int] | None = None

    def seconds(self, done: int, total: int) -> float | None:
        """How long all of it takes, in seconds, with so many tokens done; None as long as that cannot be told."""
        if self._began is None:
            if done > 0:
                self._began = time.monotonic(), done
            return None
        since, at = self._began
        return (time.monotonic() - since) * total / (done - at) if done - at >= self._step else None
