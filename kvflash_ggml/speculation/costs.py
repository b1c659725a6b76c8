"""Costs and gains of drafts: step times by rows, times and acceptance of drafters, and the budget of an answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from .draft import ROOT, Draft

Shares = npt.NDArray[np.float64]

SAMPLES = 9
"""Samples of a median."""

GROUPS = ((1, 8), (9, 1 << 30))
"""Rows that one kind of kernel computes. Where no time of a group is known, those of others give a low guess."""

BINS = 8
"""Resolution of a drafter's own probability of a token."""

POSITIONS = 32
"""Tokens further from the root count as the last of these."""

FORGET = 0.99
"""Share of the evidence that is left after each step that adds to it."""

FADE = 0.98
"""The same after a step without evidence: a bad drafter is tried again some day."""

PATIENCE = 2
"""Evidence fades this many times slower after a try in vain."""

HOPE, WEIGHT = 0.8, 4.0
"""Expected acceptance of an unknown drafter, and how many drafts it takes to overrule that."""

TRUST = 4.0
"""Drafts until a position or a bin is believed to differ from the others."""

SURPRISE = 1e-3
"""Successive steps that accept nothing are a change of the text if they were less likely than this."""

EPS = 0.02
"""Share of the time of plain decoding that drafts may cost."""

CREDIT = 4.0
"""Plain steps that drafts may cost beyond that."""

EARNED = 8.0
"""Earlier gains count up to this many times that credit."""

_UNSURE = BINS  # the row of drafts without a probability


class StepTimes:
    """Median step times by rows. The first step of a new number of rows is kept apart: it builds a graph.

    switch: extra seconds of such a first step. max_rows: the most that were timed, 0 for none.
    """

    def __init__(self) -> None:
        self.switch = 0.0
        self.max_rows = 0
        self._steady: dict[int, deque[float]] = {}
        self._firsts: dict[int, deque[float]] = {}
        self._known: dict[int, float] = {}
        self._guessed: dict[int, float] = {}

    def record(self, rows: int, seconds: float, *, first: bool) -> None:
        """Note the time of a step. first: the step before it had other rows."""
        times = self._firsts if first else self._steady
        news = first or rows not in self._steady
        times.setdefault(rows, deque(maxlen=SAMPLES)).append(seconds)
        if not first:
            self._known[rows] = median(times[rows])
        if news:
            self.switch = self._late()
            for others in self._firsts.keys() - self._steady.keys() - {1}:
                # Without another step of these rows, first steps count, less the cost of changing rows. One alone would
                # not: that cost may not be known yet, and without a second step of these rows would never be.
                if len(self._firsts[others]) > 1:
                    self._known[others] = median(self._firsts[others]) - self.switch
        self.max_rows = max(self.max_rows, rows)
        if self._guessed:
            self._guessed = {}

    def knows(self, rows: int) -> bool:
        """Return whether a step of `rows` rows, or fewer, was timed."""
        return bool(self._known) and min(self._known) <= rows

    def __call__(self, rows: int) -> float:
        """Return the seconds of a step of `rows` rows; a low guess where none was timed. `knows` must be true."""
        if rows not in self._guessed:
            self._guessed[rows] = max(self._known[min(self._known)], self._guess(rows))
        return self._guessed[rows]

    def _guess(self, rows: int) -> float:
        if rows in self._known:
            return self._known[rows]
        begin, end = next(group for group in GROUPS if rows <= group[1])
        timed = {known: seconds for known, seconds in self._known.items() if begin <= known <= end}
        least, most = min(self._known), max(self._known)
        if not timed:
            timed[most] = self._known[most]
        if rows > max(timed):
            timed[least] = self._known[least]
        low, high = min(timed), max(timed)
        if rows > high > low and (low < begin or low == 1):
            # a part of the difference is another kernel's, nobody knows yet how much: half is taken for that
            timed[low] = (timed[low] + timed[high]) / 2
        return _between(timed, rows)

    def _late(self) -> float:
        late = [
            seconds - self._known[rows]
            for rows, times in self._firsts.items()
            if rows in self._steady
            for seconds in times
        ]
        return max(0.0, median(late)) if late else 0.0


def median(values: Iterable[float]) -> float:
    """Return the median of at least one value. `statistics.median` is slower, and this runs at each step."""
    ranked = sorted(values)
    middle = len(ranked) // 2
    return ranked[middle] if len(ranked) % 2 else (ranked[middle - 1] + ranked[middle]) / 2


def _between(timed: dict[int, float], rows: int) -> float:
    """Return the time of `rows` on the line between its neighbours; level before the first, as steep after the last."""
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


class Acceptance:
    """P(a drafted token is accepted | the one before it was), by its position and the drafter's own probability.

    Only tokens that were tested count. A cell with little evidence is assumed to be like its row, a row like the total,
    and the total like `hope`.
    """

    def __init__(self, hope: float = HOPE) -> None:
        self._hope = hope
        self._reached = np.zeros((BINS + 1, POSITIONS))
        self._accepted = np.zeros((BINS + 1, POSITIONS))
        self._rested = 0  # steps without evidence that have not faded the tables yet
        self._again = False  # there were such steps since the last evidence
        self._patience = 1  # steps without evidence that count as one
        self._misses = 0
        self._likelihood = 1.0  # of these misses, by the estimates

    def of(self, draft: Draft) -> Shares:
        """Return the probability of each node, given its parent; [n]."""
        self._age()
        rows, columns = _cells(draft)
        chances: Shares = self._estimate()[rows, columns]
        return chances

    def by_position(self, count: int) -> Shares:
        """Return the probability of a token at each position, whatever its drafter's own probability; [count]."""
        self._age()
        reached, accepted = self._reached.sum(axis=0), self._accepted.sum(axis=0)
        shares = (accepted + TRUST * self._overall()) / (reached + TRUST)
        by_position: Shares = shares[np.minimum(np.arange(count), POSITIONS - 1)]
        return by_position

    def record(self, draft: Draft, path: Sequence[int], *, stopped: bool = False) -> None:
        """Count a verified draft whose nodes of `path` were accepted, in order.

        stopped: the text ended after them, so none of their children was tested.
        """
        tested = set([ROOT, *path][: len(path) if stopped else None])
        if not tested or not len(draft):
            return
        if path:
            self._patience = 1
        elif self._again:
            self._patience = PATIENCE
        self._again = False
        rows, columns = _cells(draft)
        chance = self.of(draft)[draft.parent == ROOT].sum()
        self._fade(FORGET)
        reached = [parent in tested for parent in draft.parent.tolist()]
        np.add.at(self._reached, (rows[reached], columns[reached]), 1)
        accepted = list(path)
        np.add.at(self._accepted, (rows[accepted], columns[accepted]), 1)
        self._doubt(bool(path), float(chance), rows)

    def rest(self, steps: int = 1) -> None:
        """Note steps without a draft of this drafter."""
        self._rested += steps
        self._again = True

    def _age(self) -> None:
        if self._rested:
            self._fade(FADE ** (self._rested / self._patience))
            self._rested = 0

    def _doubt(self, accepted: bool, chance: float, rows: npt.NDArray[np.intp]) -> None:
        """Forget the evidence for these rows if nothing is accepted any more."""
        if accepted:
            self._misses, self._likelihood = 0, 1.0
            return
        self._misses += 1
        self._likelihood *= max(0.0, 1 - chance)
        if self._likelihood < SURPRISE:
            self._reached[rows] = self._accepted[rows] = 0
            self._reached[rows[0], 0] = self._misses
            self._misses, self._likelihood = 0, 1.0

    def _fade(self, share: float) -> None:
        self._reached *= share
        self._accepted *= share

    def _overall(self) -> float:
        return float((self._accepted.sum() + WEIGHT * self._hope) / (self._reached.sum() + WEIGHT))

    def _estimate(self) -> Shares:
        rows = (self._accepted.sum(axis=1) + TRUST * self._overall()) / (self._reached.sum(axis=1) + TRUST)
        cells: Shares = (self._accepted + TRUST * rows[:, None]) / (self._reached + TRUST)
        return cells


class DraftCosts:
    """What the drafts of one drafter take and win. serial: its tokens cost one after the other, beside a part that does
    not grow with their number.

    unread: tokens of a prompt that it reads before it proposes. pace: seconds that each of these took last. failed:
    proposals in vain, in a row. resting: steps until it is considered again, and why. idle_steps: steps
    since it proposed.
    """

    def __init__(self, serial: bool, hope: float) -> None:
        self.acceptance = Acceptance(hope)
        self.serial = serial
        self.unread, self.pace = 0, 0.0
        self.failed = self.resting = self.idle_steps = 0
        self.why = ""
        self._counts: deque[int] = deque(maxlen=SAMPLES)
        self._times: dict[int, deque[float]] = {}  # by tokens if it is serial, else all at 0
        self._known: dict[int, float] = {}  # their medians

    def record(self, count: int, seconds: float) -> None:
        """Note a proposal of `count` tokens."""
        self.idle_steps = 0
        if count:
            self._counts.append(count)
        if self.unread:
            self.pace = seconds / self.unread
        elif count or not self.serial:
            at = count if self.serial else 0
            if not self._known:
                self._known[at] = seconds
                return
            if not self._times:
                self._known = {}
            times = self._times.setdefault(at, deque(maxlen=SAMPLES))
            times.append(seconds)
            self._known[at] = median(times)

    @property
    def unsure(self) -> bool:
        """Whether it has proposed too few times to be judged: until the second time is known, since the first proposal
        may have built graphs. A few short drafts of one that is serial are cheap, and two or three say little of its
        acceptance.
        """
        return len(self._counts) < SAMPLES if self.serial else not self._times

    def rest(self, steps: int) -> None:
        """Note steps, whoever drafted for them."""
        self.idle_steps += steps
        self.resting = max(0, self.resting - steps)

    def length(self, limit: int) -> int:
        """Return how many tokens it proposes if it is asked for `limit`."""
        return limit if self.serial or not self._counts else min(limit, round(median(self._counts)))

    def seconds(self, count: int) -> float:
        """Return the seconds that a proposal of `count` tokens takes; a low guess where none was timed, 0 at first."""
        known = self._known
        if not known:
            return 0.0
        if not self.serial:
            return known[0]
        if count in known:
            return known[count]
        first, last = min(known), max(known)
        if count < first:
            return known[first] * count / first
        # a part of it is fixed, nobody knows yet how much: half is taken for that
        return _between(known, count) if first < last else known[last] * (last + count) / (2 * last)


class Budget:
    """The time that drafts may cost an answer, so that the bound of `Controller` holds. All times are seconds.

    plain: time that plain decoding would have taken. spent: time that the answer took. excess: what drafts cost beyond
    what they won. pending: time of the proposals of this step.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin an answer."""
        self.plain = self.spent = self.excess = self.pending = 0.0

    def left(self, step: float) -> float:
        """Return what the next step may cost beyond a plain `step`."""
        return CREDIT * step + EPS * self.plain - self.excess - self.pending

    def record(self, step: float, steps: float, seconds: float, *, plain: bool) -> None:
        """Note a step that won as much as so many plain steps of `step` each. plain: it costs what these cost."""
        self.record_plain(steps * step, seconds + self.pending)
        self.excess += self.pending if plain else seconds + self.pending - steps * step
        self.excess = max(self.excess, -EARNED * CREDIT * step)

    def record_plain(self, plain: float, spent: float | None = None) -> None:
        """Note steps that plain decoding would have taken `plain` for. spent: what they took, if not the same."""
        self.plain += plain
        self.spent += plain if spent is None else spent


def expected(draft: Draft, acceptance: Shares) -> Shares:
    """Return the tokens that a step wins if it verifies the first 0, 1 ... n nodes of a draft; [n + 1].

    acceptance: of each node, given its parent.
    """
    reached = acceptance.tolist()
    for node, parent in enumerate(draft.parent.tolist()):
        if parent != ROOT:
            reached[node] *= reached[parent]
    return np.cumsum([1.0, *reached])


def _cells(draft: Draft) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return the row and column of each node in the tables."""
    columns = np.minimum(draft.depths() - 1, POSITIONS - 1).astype(np.intp)
    if draft.logp is None:
        return np.full(len(draft), _UNSURE, np.intp), columns
    sure = np.exp(np.minimum(draft.logp.astype(np.float64), 0))
    return np.minimum(sure * BINS, BINS - 1).astype(np.intp), columns
