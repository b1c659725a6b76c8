"""When chunks are scored, and when pages move for it, counted in tokens of the text. No thread, no look at a clock."""

from __future__ import annotations

from ..state.session import PolicyState

SCORES_PER_TAU = 4
"""Scores between two moves that tau asks for: they move pages only if an evicted chunk is clearly better."""

TAU = 64
"""Tokens between two moves, before tau adapts."""

MAX_TAU = 4096


class Selection:
    """A clock that ticks with every token that is generated.

    tau: tokens between two moves, or None to adapt to what scoring costs. share: of the time of the decode, that
    scoring may take then. delay: tokens between asking for scores and their use, so that what is computed never depends
    on how fast a thread was.
    """

    def __init__(self, *, tau: int | None, share: float, delay: int) -> None:
        self.tau = tau or TAU
        self._fixed = tau is not None
        self._share = share
        self._delay = delay
        self._since_score = 0
        self._since_move = 0
        self._due = 0  # tokens until scores that have been asked for are used
        self._token_seconds = 0.0
        self._last = 0.0  # when the newest tokens came

    def on_tokens(self, count: int, *, waiting: bool, now: float) -> bool:
        """So many tokens have been generated: is it time to score? waiting: scores have been asked for already."""
        if self._last:
            self._token_seconds += 0.1 * ((now - self._last) / count - self._token_seconds)
        self._last = now
        self._since_score += count
        self._since_move += count
        if waiting:
            self._due -= count
            return False
        if self._since_score < self.tau // SCORES_PER_TAU:  # `interval`, but this is asked once a token
            return False
        self._since_score = 0
        self._due = self._delay
        return True

    @property
    def interval(self) -> int:
        """Tokens between two looks."""
        return max(1, self.tau // SCORES_PER_TAU)

    @property
    def is_due(self) -> bool:
        """Is it time to use the scores that were asked for?"""
        return self._due <= 0

    @property
    def must_move(self) -> bool:
        """Has it been tau tokens since the resident set was what ranks best?"""
        return self._since_move >= self.tau

    def moved(self) -> None:
        """The resident set is brought to what ranks best with the next step."""
        self._since_move = 0

    def restart(self) -> None:
        """The text was cut, or another request begins."""
        self._since_score = self._since_move = self._due = 0
        self._last = 0.0

    def adapt(self, seconds: float) -> None:
        """Scoring has taken so long: double or halve tau until it takes about its share of the decode time."""
        if self._fixed or not self._token_seconds:
            return
        share = seconds * SCORES_PER_TAU / (self.tau * self._token_seconds)
        if share > self._share and self.tau < MAX_TAU:
            self.tau *= 2
        elif share < self._share / 4 and self.tau > TAU:
            self.tau //= 2

    def write(self, saved: PolicyState) -> None:
        """Note the clock in a policy's state."""
        saved.tau = self.tau
        saved.since_look, saved.since_reselect, saved.due = self._since_score, self._since_move, self._due

    def load(self, saved: PolicyState) -> None:
        """Go on from there."""
        if not self._fixed:
            self.tau = saved.tau
        self._since_score, self._since_move, self._due = saved.since_look, saved.since_reselect, saved.due
