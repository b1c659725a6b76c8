"""When chunks are scored, and when pages move for it, counted in tokens of the text. It has no thread and no clock."""

from __future__ import annotations

from ..state.session import PolicyState

SCORES_PER_TAU = 4
"""Scores between two full reselections. They move pages only if an evicted chunk is clearly better."""

TAU = 64
"""Tokens between two reselections, before tau adapts."""

MAX_TAU = 4096


class Selection:
    """A clock that ticks with every generated token.

    tau: tokens between two reselections, or None to adapt to the cost of scoring. share: share of the decode time that
    scoring may then take. delay: tokens between a request for scores and their use, so that the result never depends on
    the speed of a thread.
    """

    def __init__(self, *, tau: int | None, share: float, delay: int) -> None:
        self.tau = tau or TAU
        self._fixed = tau is not None
        self._share = share
        self._delay = delay
        self._since_score = 0
        self._since_move = 0
        self._due = 0  # tokens until the requested scores are used
        self._token_seconds = 0.0
        self._last = 0.0  # time of the newest tokens

    def on_tokens(self, count: int, *, waiting: bool, now: float) -> bool:
        """Count generated tokens, and return whether to score now. waiting: scores have been requested already."""
        if self._last:
            self._token_seconds += 0.1 * ((now - self._last) / count - self._token_seconds)
        self._last = now
        self._since_score += count
        self._since_move += count
        if waiting:
            self._due -= count
            return False
        if self._since_score < self.tau // SCORES_PER_TAU:  # `interval`, without a call at each token
            return False
        self._since_score = 0
        self._due = self._delay
        return True

    @property
    def interval(self) -> int:
        """Tokens between two scores."""
        return max(1, self.tau // SCORES_PER_TAU)

    @property
    def is_due(self) -> bool:
        """Whether to use the requested scores now."""
        return self._due <= 0

    @property
    def must_move(self) -> bool:
        """Whether tau tokens have passed since the last full reselection."""
        return self._since_move >= self.tau

    def moved(self) -> None:
        """Note that the next step reselects fully."""
        self._since_move = 0

    def restart(self) -> None:
        """Start again after a cut, or for another request."""
        self._since_score = self._since_move = self._due = 0
        self._last = 0.0

    def adapt(self, seconds: float) -> None:
        """Note the seconds of a score. Double or halve tau until scoring takes about its share of the decode time."""
        if self._fixed or not self._token_seconds:
            return
        share = seconds * SCORES_PER_TAU / (self.tau * self._token_seconds)
        if share > self._share and self.tau < MAX_TAU:
            self.tau *= 2
        elif share < self._share / 4 and self.tau > TAU:
            self.tau //= 2

    def write(self, saved: PolicyState) -> None:
        """Write the clock to a policy's state."""
        saved.tau = self.tau
        saved.since_score, saved.since_reselect, saved.due = self._since_score, self._since_move, self._due

    def load(self, saved: PolicyState) -> None:
        """Continue from a policy's state."""
        if not self._fixed:
            self.tau = saved.tau
        self._since_score, self._since_move, self._due = saved.since_score, saved.since_reselect, saved.due
