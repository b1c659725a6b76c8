"""When chunks are scored, and when pages move for it, counted in tokens of the text. It has no thread and no clock."""

from __future__ import annotations

from collections import deque

from ..state.session import PolicyState

SCORES_PER_TAU = 4
"""Scores between two full reselections. They move pages only if an evicted chunk is clearly better."""

TAU = 64
"""Tokens between two reselections from which on all of the pool moves, where tau adapts."""

MAX_TAU = 4096
"""Reached where a score takes as long as a hundred tokens, as all heads of a long text do on a CPU."""

EASE = 0.75
"""Part of its share that scoring must stay below with half the tau before tau is halved."""

NEWEST = 3
"""Scores whose fastest one counts: another process, or the first look at a text, makes single ones slow."""

CHUNKS_PER_TOKEN = 128
"""Chunks of a context from which on a score at every token, which no clock bounds, would take too long."""


def steady_interval(n_chunks: int) -> int:
    """Return the tokens between two scores where no clock may decide, for contexts of up to `n_chunks` chunks."""
    return min(TAU // SCORES_PER_TAU, -(-n_chunks // CHUNKS_PER_TOKEN))


class Selection:
    """A clock that ticks with every generated token.

    tau: tokens between two reselections, four times the tokens between two scores. None: a score every `interval`
    tokens, or in more tokens where that takes more than `share` of the decode time; with a share of None it stays.
    Below TAU there is no full reselection then: pages move whenever a chunk is asked for. delay: tokens between a
    request for scores and their use, so that the result never depends on the speed of a thread. No scores are requested
    meanwhile.
    """

    def __init__(self, *, tau: int | None, share: float | None, delay: int, interval: int = 1) -> None:
        self._least = SCORES_PER_TAU * max(interval, delay)
        self.tau = tau or self._least
        self._fixed = tau is not None
        self._share = share
        self._delay = delay
        self._since_score = 0
        self._since_move = 0
        self._due = 0  # tokens until the requested scores are used
        self._token_seconds = 0.0
        self._seconds: deque[float] = deque(maxlen=NEWEST)  # of the newest scores
        self._last = 0.0  # time of the newest tokens

    def on_tokens(self, count: int, *, waiting: bool, now: float) -> bool:
        """Count generated tokens, and return whether to score now. waiting: scores have been requested already."""
        if self._last:
            seconds = (now - self._last) / count
            self._token_seconds += (0.1 if self._token_seconds else 1) * (seconds - self._token_seconds)
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
        """Whether it is time for a full reselection."""
        return self._since_move >= self.tau and (self._fixed or self.tau >= TAU)

    def moved(self) -> None:
        """Note that the next step reselects fully."""
        self._since_move = 0

    def restart(self) -> None:
        """Start again after a cut, or for another request."""
        self._since_score = self._since_move = self._due = 0
        self._last = 0.0

    def adapt(self, seconds: float) -> None:
        """Note the seconds of a score. Double or halve tau until scoring takes about its share of the decode time."""
        if self._fixed or self._share is None or not self._token_seconds:
            return
        self._seconds.append(seconds)
        share = min(self._seconds) / (self.interval * self._token_seconds)
        if len(self._seconds) < NEWEST:
            return
        if share > self._share and self.tau < MAX_TAU:
            self.tau *= 2
        elif 2 * share < EASE * self._share and self.tau > self._least:
            self.tau //= 2

    def write(self, saved: PolicyState) -> None:
        """Write the clock to a policy's state."""
        saved.tau = self.tau
        saved.since_score, saved.since_reselect, saved.due = self._since_score, self._since_move, self._due

    def load(self, saved: PolicyState) -> None:
        """Continue from a policy's state."""
        if not self._fixed and self._share is not None:
            self.tau = min(MAX_TAU, max(self._least, saved.tau))
        self._since_score, self._since_move, self._due = saved.since_score, saved.since_reselect, saved.due
