"""How requests end: each hears its last event once, and is counted."""

from __future__ import annotations

from collections.abc import Callable

from ..logs import logged
from .messages import Event, Request, Totals, Usage
from .queue import Job

PACE_SHARE = 0.02
"""What the newest request has of the mean: lengths differ, and a hasty mean sends refused clients back too early."""


class Outcomes:
    """Counts requests that have ended. on_end: called with each, what it took and how it ended.

    pending: jobs that have had no last event, by identifier. pace: seconds a request, a slowly moving mean.
    """

    def __init__(self, on_end: Callable[[Request, Usage, str], None] | None) -> None:
        self.pending: dict[str, Job] = {}
        self.totals = Totals()
        self.pace = 1.0
        self._paced = 0
        self._on_end = on_end

    def took(self, seconds: float) -> None:
        """Note how long a request had a slot, divided by how many shared the engine."""
        self._paced += 1
        self.pace += max(1 / self._paced, PACE_SHARE) * (seconds - self.pace)

    def count(self, request: Request, usage: Usage, reason: str) -> None:
        """Count a request that has ended."""
        self.totals.add(usage, reason)
        if self._on_end is not None:
            with logged("request %s could not be counted", request.id):
                self._on_end(request, usage, reason)

    def tell(self, job: Job, event: Event) -> None:
        """Send a request its last event."""
        self.pending.pop(job.request.id, None)
        with logged("request %s: its reader is gone", job.request.id):
            job.sink(event)
