"""Rates over about the last second, for viewers."""

from __future__ import annotations

import time

from ..batching.scheduler import Scheduler

OVER_S = 1.0


class TokenSpeed:
    """Per second and over about the last one, from totals that are looked at now and then."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._then = time.monotonic()
        self._before = self._totals()
        self._rates = dict.fromkeys(self._before, 0.0)

    def _totals(self) -> dict[str, float]:
        model = self._scheduler.counters()
        made = self._scheduler.generated
        return {"tokens": made, "page_ins": model["page_ins"], "page_outs": model["page_outs"]}

    def __call__(self) -> dict[str, float]:
        """Return the tokens of answers, chunks that came back, and chunks that were copied out."""
        now = time.monotonic()
        if now - self._then >= OVER_S:
            totals, span = self._totals(), now - self._then
            self._rates = {name: round((value - self._before[name]) / span, 1) for name, value in totals.items()}
            self._then, self._before = now, totals
        return self._rates
