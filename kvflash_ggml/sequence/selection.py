"""When chunks are scored, and when pages move for it, counted in tokens of the text. It has no thread and no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..state.session import PolicyState

SCORES_PER_TAU = 4
"""Scores between two full reselections. They move pages only if an evicted chunk is clearly better."""

TAU = 64
"""Fewest tokens between two full reselections, unless a user asks for fewer."""

USUAL = TAU // SCORES_PER_TAU
"""Tokens between two scores whose cost is not known, or that are used later."""


class Selection:
    """Counts generated tokens, and says when to score and when to reselect.

    tau: tokens between two reselections, four times the tokens between two scores. None: a score every `interval`
    tokens, which may change, and a reselection with every fourth of them. Below TAU there is no full reselection then:
    pages move whenever a chunk is asked for. delay: tokens between a request for scores and their use, the interval if
    that is shorter, so that the result never depends on the speed of a thread. No scores are requested meanwhile.
    """

    def __init__(self, *, tau: int | None, delay: int = 0) -> None:
        self.interval = USUAL if tau is None else max(1, tau // SCORES_PER_TAU)
        self._tau = tau
        self._delay = delay
        self._since_score = 0
        self._since_move = 0
        self._due = 0  # tokens until the requested scores are used

    def on_tokens(self, count: int, *, waiting: bool) -> bool:
        """Count generated tokens, and return whether to score now. waiting: scores have been requested already."""
        self._since_score += count
        self._since_move += count
        if waiting:
            self._due -= count
            return False
        if self._since_score < self.interval:
            return False
        self._since_score = 0
        self._due = min(self._delay, self.interval)
        return True

    @property
    def period(self) -> int:
        """Tokens between two requests, where each step has one token: none is made while scores wait to be used."""
        return max(self.interval, min(self._delay, self.interval) + 1)

    @property
    def since_asked(self) -> int:
        """The newest tokens, from the one on that the requested scores are for."""
        return self._since_score + 1

    @property
    def is_due(self) -> bool:
        """Whether to use the requested scores now."""
        return self._due <= 0

    @property
    def must_move(self) -> bool:
        """Whether it is time for a full reselection."""
        if self._tau is not None:
            return self._since_move >= self._tau
        return self.interval >= USUAL and self._since_move >= SCORES_PER_TAU * self.interval

    def moved(self) -> None:
        """Note that the next step reselects fully."""
        self._since_move = 0

    def restart(self) -> None:
        """Start again after a cut, or for another request."""
        self._since_score = self._since_move = self._due = 0

    def write(self, saved: PolicyState) -> None:
        """Write the counts to a policy's state."""
        saved.since_score, saved.since_reselect, saved.due = self._since_score, self._since_move, self._due

    def load(self, saved: PolicyState) -> None:
        """Continue from a policy's state."""
        self._since_score, self._since_move, self._due = saved.since_score, saved.since_reselect, saved.due
