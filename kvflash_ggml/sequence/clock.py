"""How often chunks are scored beside a device: as often as the thread that scores has time for."""

from __future__ import annotations

from collections import deque

from .selection import USUAL, used_after

MAX_INTERVAL = 1024
"""Reached where a score takes as long as a hundred tokens, as all heads of a long text do on a CPU."""

EASE = 0.75
"""Part of its share that scoring must stay below with half the interval before the interval is halved."""

NEWEST = 3
"""Scores whose fastest one counts: another process, or the first score of a text, makes single ones slow."""


class Clock:
    """Measures tokens and scores, and says how many tokens lie between two scores.

    share: of the decode time, which scoring may take. wait: a score of a lone answer may take the tokens until it is
    used, and this share of the tokens between two scores, for which the answer waits. The thread that scores calls
    `on_score` while another thread calls the rest: so each number here is changed by one of them only.
    """

    def __init__(self, share: float, wait: float = 0.0) -> None:
        self._least = USUAL
        self._times = 1  # the least interval
        self._share, self._wait = share, wait
        self._waited = 0.0
        self._token_seconds = 0.0
        self._seconds: deque[float] = deque(maxlen=NEWEST)  # of the newest scores
        self._last = 0.0  # time of the newest tokens

    @property
    def interval(self) -> int:
        """The tokens between two scores, never fewer than `at_least` was told."""
        return min(MAX_INTERVAL, self._least * self._times)

    def at_least(self, tokens: int) -> int:
        """Return the interval for scores of another cost, of which this many tokens would be the least.

        What the clock has found is kept: the interval stays as many times the least one.
        """
        self._least = tokens
        return self.interval

    def on_tokens(self, count: int, now: float) -> None:
        """Note the time at which `count` tokens have been generated."""
        if self._last:
            seconds = (now - self._last - self._waited) / count
            self._token_seconds += (0.1 if self._token_seconds else 1) * (seconds - self._token_seconds)
        self._last, self._waited = now, 0.0

    def waited(self, seconds: float) -> None:
        """Note that the next tokens waited so long for scores: a token's own time does not grow by that."""
        self._waited += seconds

    def restart(self) -> None:
        """Note that the next tokens do not follow the last ones at once."""
        self._last = self._waited = 0.0

    def on_score(self, seconds: float, texts: int = 1) -> None:
        """Note the seconds of a score. Double or halve the interval until scoring takes about its share.

        texts: that decode together, which wait for the scores of all. Scores of a prompt do not count: they have other
        rows, or a policy's model reads all of a step for them.
        """
        if not (self._last and self._token_seconds):
            return
        self._seconds.append(texts * seconds)
        if len(self._seconds) < NEWEST:
            return
        tokens = min(self._seconds) / self._token_seconds
        if tokens > self._room(self.interval, texts) and self.interval < MAX_INTERVAL:
            self._times *= 2
        elif self._times > 1 and tokens < EASE * self._room(self.interval // 2, texts):
            self._times //= 2

    def _room(self, interval: int, texts: int) -> float:
        """Return the tokens in whose time a score may be made."""
        lone = used_after(interval) + self._wait * interval if self._wait and texts == 1 else 0.0
        return max(lone, self._share * interval)
