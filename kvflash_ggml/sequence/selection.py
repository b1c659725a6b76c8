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


def used_after(interval: int, delay: int = USUAL) -> int:
    """Return after how many tokens scores are used: half of the tokens between two, `delay` at most."""
    return min(delay, (interval + 1) // 2)


class Selection:
    """Counts generated tokens, and says when to score and when to reselect.

    tau: tokens between two reselections, four times the tokens between two scores. None: a score every `interval`
    tokens, which may change, and a reselection with every fourth of them. Below TAU there is no full reselection then:
    pages move whenever a chunk is asked for. delay: tokens between a request for scores and their use, half of the
    interval if that is shorter, so that the result never depends on the speed of a thread. Two requests can wait.
    """

    def __init__(self, *, tau: int | None, delay: int = 0) -> None:
        self.interval = USUAL if tau is None else max(1, tau // SCORES_PER_TAU)
        self._tau = tau
        self._delay = delay
        self._since_score = 0
        self._since_move = 0
        self._age = 0  # tokens since the oldest request that waits

    def on_tokens(self, count: int, *, waiting: int) -> bool:
        """Count generated tokens, and return whether to score now. waiting: requests whose scores are not used yet."""
        self._since_score += count
        self._since_move += count
        if waiting:
            self._age += count
        if self._since_score < self.interval or waiting > 1:
            return False
        self._since_score = 0
        if not waiting:
            self._age = 0
        return True

    @property
    def is_due(self) -> bool:
        """Whether to use the scores of the oldest request that waits now."""
        return self._age >= used_after(self.interval, self._delay)

    @property
    def since_asked(self) -> int:
        """The newest tokens, from the one on that the oldest request is for."""
        return self._age + 1

    def used(self) -> None:
        """Note that the scores of the oldest request are used: the newest one, if there are two, is the oldest now."""
        self._age = self._since_score

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
        self._since_score = self._since_move = self._age = 0

    def write(self, saved: PolicyState) -> None:
        """Write the counts to a policy's state."""
        saved.since_score, saved.since_reselect = self._since_score, self._since_move
        saved.due = -self._age if saved.pending else 0  # whatever the interval is where it is restored

    def load(self, saved: PolicyState) -> None:
        """Continue from a policy's state."""
        self._since_score, self._since_move = saved.since_score, saved.since_reselect
        self._age = -saved.due
