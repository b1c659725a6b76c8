"""How long steps take, by the rows they evaluate."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

SAMPLES = 9
"""The median of so many is taken."""

GROUPS = ((1, 8), (9, 1 << 30))
"""Rows that one kind of kernel computes: nothing is concluded from one group for the other but where it begins."""


class Times:
    """Medians of steps by rows. The first step of other rows than before is kept apart: it builds a graph.

    switch: what such a first step takes longer, in seconds. most: the most rows that were timed, 0 for none.
    """

    def __init__(self) -> None:
        self.switch = 0.0
        self.most = 0
        self._steady: dict[int, deque[float]] = {}
        self._firsts: dict[int, deque[float]] = {}
        self._known: dict[int, float] = {}
        self._guessed: dict[int, float] = {}

    def told(self, rows: int, seconds: float, *, first: bool) -> None:
        """A step took so long. first: the one before it had other rows."""
        times = self._firsts if first else self._steady
        news = first or rows not in self._steady
        times.setdefault(rows, deque(maxlen=SAMPLES)).append(seconds)
        if not first:
            self._known[rows] = median(times[rows])
        if news:
            self.switch = self._late()
            for others in self._firsts.keys() - self._steady.keys() - {1}:
                # First steps stand for the others as long as no other was seen, but for what changing rows takes.
                self._known[others] = median(self._firsts[others]) - self.switch
        self.most = max(self.most, rows)
        if self._guessed:
            self._guessed = {}

    @property
    def known(self) -> bool:
        """Has a plain step been timed?"""
        return 1 in self._known

    def __call__(self, rows: int) -> float:
        """Seconds of a step of so many rows, guessed low where none was timed. A plain one must be known."""
        if rows == 1:
            return self._known[1]
        if rows not in self._guessed:
            self._guessed[rows] = max(self._known[1], self._guess(rows))
        return self._guessed[rows]

    def _guess(self, rows: int) -> float:
        if rows in self._known:
            return self._known[rows]
        begin, end = next(group for group in GROUPS if rows <= group[1])
        timed = {known: seconds for known, seconds in self._known.items() if begin <= known <= end}
        return _between(timed, rows) if timed else self._known[max(self._known)]

    def _late(self) -> float:
        late = [
            seconds - self._known[rows]
            for rows, times in self._firsts.items()
            if rows in self._steady
            for seconds in times
        ]
        return max(0.0, median(late)) if late else 0.0


def median(values: Iterable[float]) -> float:
    """Of at least one; without the care of `statistics.median`, since it is taken at each step."""
    ranked = sorted(values)
    middle = len(ranked) // 2
    return ranked[middle] if len(ranked) % 2 else (ranked[middle - 1] + ranked[middle]) / 2


def _between(timed: dict[int, float], rows: int) -> float:
    """The time of `rows`, on the line between its neighbours; level in front of them, as steep behind them."""
    known = sorted(timed)
    below = [k for k in known if k < rows]
    above = [k for k in known if k > rows]
    if not below:
        return timed[above[0]]
    if above:
        left, right = below[-1], above[0]
    elif len(below) > 1:
        left, right = below[-2:]
    else:
        return timed[below[-1]]
    slope = (timed[right] - timed[left]) / (right - left)
    return timed[below[-1]] + slope * (rows - below[-1]) if above else timed[right] + max(0.0, slope) * (rows - right)
