"""Decides whether to draft, and how many rows to verify, within a budget of time.

Nothing here reads a clock: the caller passes the time of each step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from .costs import EPS, FADE, HOPE, Budget, DraftCosts, Shares, StepTimes, expected
from .draft import Draft

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Possible rows of a step, the root's included. They are few, since another number of rows costs a graph."""

MARGIN = 1.05
"""A change must promise to be this much faster."""

HOLD = 8
"""Steps between two changes of the rows."""

CLIMB = 2
"""Successive steps whose drafts were entirely right, after which the rows may grow at once."""

STAY = 16.0
"""Steps that the rows are expected to stay the same, before it is known."""

FRESH = 128
"""Plain steps are timed again after the time of this many, and for an answer in a text that has grown by half."""

RECONSIDER = 16
"""Steps until a drafter that is not worth asking is considered again: deciding takes time too."""

PROMPT = 64
"""From this many unread tokens on, the time of a proposal counts as reading, not as drafting."""

SPENT = "the budget for drafts is spent"

CHEAP = 0.1
"""A proposal that takes less than this share of a plain step is made without weighing its promise."""

TIMING = "plain steps are being timed"


class Controls:
    """Decides about drafts; this base decodes plainly. A step calls `ask`, `proposed`, `choose` and `record` in turn.

    off: why the last step was plain, None if it verified a draft.
    """

    off: str | None = None

    @property
    def excess(self) -> float:
        """Seconds that drafts have cost beyond what they won since `begin`, below 0 if they won."""
        return 0.0

    @property
    def speedup(self) -> float | None:
        """How many times faster than plain decoding the answer is since `begin`; None before that is known."""
        return None

    def begin(self, length: int) -> None:
        """Begin an answer to a text of `length` tokens."""

    def apart(self) -> None:
        """Note that steps of another kind ran since the last step, so the next time is not compared with it."""

    def ask(self, source: str, behind: int = 0, instead: Collection[str] = ()) -> int:
        """Return how many tokens to ask a drafter for now; 0 for none.

        behind: tokens that the drafter reads first. instead: drafters that can be asked if this one is not. 0 if one of
        them promises more.
        """
        return 0

    def proposed(self, source: str, draft: Draft | None, seconds: float) -> None:
        """Note a proposal, None or empty for nothing, and the seconds it took."""

    def choose(self, draft: Draft, instead: Collection[str] = ()) -> int:
        """Return the rows to verify, the root included: the first rows - 1 nodes, padded if there are fewer.

        1 is a plain step. instead: drafters that could be asked as well. 1 if one of them promises more.
        """
        return 1

    def record(
        self, rows: int, seconds: float, draft: Draft | None = None, path: Sequence[int] = (), *,
        stopped: bool = False, beside: int = 0,
    ) -> None:  # fmt: skip
        """Note a step: its rows, its seconds without proposals, and the accepted nodes (`path`) of its draft.

        draft: what the step verified, without padding; None for a plain step, which has more than one row where other
        texts needed them. stopped: the text ended there, so nodes after the path were not tested. beside: rows of other
        texts in the step, not counted in `rows`. The next step is expected to have as many.
        """

    def idle(self, sources: Collection[str]) -> int:
        """Return for how many steps none of these drafters is worth asking. These steps need no `record`."""
        return 0

    def passed(self, steps: int) -> float:
        """Note plain steps that were neither timed nor reported. Returns the seconds they took, as far as is known."""
        return 0.0


class Fixed(Controls):
    """Always verifies the same number of rows, so the steps depend on the tokens alone."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def ask(self, source: str, behind: int = 0, instead: Collection[str] = ()) -> int:
        return self._rows - 1

    def choose(self, draft: Draft, instead: Collection[str] = ()) -> int:
        return self._rows if len(draft) else 1


class _Choice(NamedTuple):
    """rows: of a step. rate: tokens a second. short: other rows win more than a plain step, but exceed the budget."""

    rows: int
    rate: float
    short: bool


class Controller(Controls):
    """Chooses the rows that win most tokens a second, by the times and acceptance of recent steps and drafts.

    The bound: let P be the time that plain decoding would have taken for the same tokens, and T[1] the time of one
    plain step. An answer takes at most (1 + EPS) P + 4 T[1], plus the error of one step's expected time, whatever
    drafters return. A step that could break this bound is not taken. Times and acceptance outlive the answer.

    With rows of other texts beside it, a step takes the time of all rows and wins a token for each of the others. Then
    tokens and times here are those of all texts together.

    level: every text of a step has as many rows as this one, so a draft costs rows of all texts and wins tokens of one.
    The next step is expected to have as many texts then.

    widths: rows that may be verified. serial: names of the drafters that compute their tokens one after the other.
    hopes: expected acceptance of drafters before there is evidence.
    """

    def __init__(
        self,
        widths: Sequence[int] = WIDTHS,
        *,
        serial: Collection[str] = (),
        hopes: Mapping[str, float] | None = None,
        level: bool = False,
    ) -> None:
        self._widths = tuple(sorted(width for width in widths if width > 1))
        self._serial, self._hopes = frozenset(serial), hopes or {}
        self._drafters: dict[str, DraftCosts] = {}
        self._times = StepTimes()  # by rows of all texts
        self._budget = Budget()
        self._level = level
        self._beside = 0  # rows of other texts in the last step, or such texts if all have equally many
        self._rows = 0  # of the last step
        self._drafted_rows, self._since = 0, HOLD  # rows verified last, and steps since they changed
        self._all_right = 0  # steps in a row that accepted their whole draft
        self._stay, self._run = STAY, 0  # steps with the same rows: on average, and now
        self._length = 0  # of the text
        self._timed_at = 0  # length of the text when a plain step was last timed
        self._since_timed = 0.0  # seconds since
        self._due = 0  # plain steps to take, to time them
        self.begin(0)

    def begin(self, length: int) -> None:
        self.off = None
        self._budget.begin()
        self._length = length
        self._rows = self._due = 0
        for drafter in self._drafters.values():
            drafter.unread = 0  # they were of another text
        if 2 * length > 3 * self._timed_at:
            self._since_timed = inf
        self._want_times(2 if self._knows else 3)

    @property
    def excess(self) -> float:
        return self._budget.excess

    @property
    def speedup(self) -> float | None:
        return self._budget.plain / self._budget.spent if self._budget.spent else None

    def apart(self) -> None:
        self._rows = 0

    # --- before a step

    def ask(self, source: str, behind: int = 0, instead: Collection[str] = ()) -> int:
        drafter, limit = self._drafter(source), self._widths[-1] - 1
        drafter.unread = behind if behind >= PROMPT else 0
        why_not = None
        if self._due or not self._knows:
            why_not = TIMING
        elif drafter.resting:
            why_not = drafter.why
        elif self._is_late(drafter):
            why_not = SPENT
        elif not drafter.serial and drafter.seconds(limit) <= CHEAP * self._time(1):
            if self._extra(self._widths[0], drafter.seconds(limit)) > self._left():
                why_not = SPENT
        else:
            left = self._left()
            # One draft of seven tokens took nearly all of the budget. If it was wrong, an answer had no others.
            risk = left / 2 if drafter.serial and drafter.unsure else left
            best = self._best(self._average(drafter), self._widths, drafter.seconds, risk)
            shortest = self._widths[0] - 1
            if best.rows == 1 and drafter.unsure and self._extra(shortest + 1, drafter.seconds(shortest)) <= left:
                limit = shortest
            elif best.rows == 1:
                why_not = SPENT if best.short else f"{source} costs more than it wins"
                drafter.resting, drafter.why = RECONSIDER, why_not
            elif any(self._promise(other) > best.rate for other in instead):
                why_not = f"{source} promises less than another source"
            elif drafter.serial:
                limit = best.rows - 1
        self.off = why_not or self.off
        return 0 if why_not else limit

    def proposed(self, source: str, draft: Draft | None, seconds: float) -> None:
        count = len(draft) if draft is not None else 0
        self._drafter(source).record(count, seconds)
        self._budget.pending += seconds
        if not count:
            self.off = f"{source} had nothing to propose"
            self._fail(source)

    def choose(self, draft: Draft, instead: Collection[str] = ()) -> int:
        if not len(draft) or self._due or not self._knows:
            return 1
        tokens = expected(draft, self._drafter(draft.source).acceptance.of(draft))
        enough = next((width for width in self._widths if width > len(draft)), self._widths[-1])
        best = self._best(tokens, [width for width in self._widths if width <= enough or width == self._rows])
        if best.rows > 1 and any(self._promise(source) > best.rate for source in instead):
            self.off = f"{draft.source}'s draft promises less than another source"
            return 1
        if best.rows == 1:
            self.off = SPENT if best.short else f"{draft.source}'s draft is not worth its rows"
            self._fail(draft.source)
        return best.rows

    # --- after a step

    def record(
        self, rows: int, seconds: float, draft: Draft | None = None, path: Sequence[int] = (), *,
        stopped: bool = False, beside: int = 0,
    ) -> None:  # fmt: skip
        first, changed = rows != self._rows and not beside, self._rows not in (0, rows)
        won, self._beside = 1 + len(path), beside // rows if self._level else beside
        self._times.record(rows + beside, seconds, first=first)  # other texts change their rows at any time
        if rows > 1 and draft is None:  # for drafts of other texts, which pay for it: a plain step of this one
            rows, seconds = 1, self._time(1) if self._knows else 0.0
        # a plain step behind a plain step is what plain decoding would have done, whatever it took
        if self._knows:
            self._since_timed += seconds
            self._budget.record(self._time(1), self._gain(won), seconds, plain=rows == 1 and not changed)
        self._budget.pending = 0.0
        self._all_right = self._all_right + 1 if draft is not None and len(path) == len(draft) else 0
        self._record_rows(rows, first, won)
        if rows > 1:
            self.off = None
        for name, drafter in self._drafters.items():
            drafter.rest(1)
            if draft is not None and name == draft.source:
                drafter.failed = 0
                drafter.acceptance.record(draft, path, stopped=stopped)
            else:
                drafter.acceptance.rest()

    def idle(self, sources: Collection[str]) -> int:
        if self._due or self._rows != 1 or not self._knows:
            return 0
        return min((self._drafter(name).resting for name in sources), default=RECONSIDER)

    def passed(self, steps: int) -> float:
        seconds = steps * self._time(1)
        self._budget.record_plain(seconds)
        self._since_timed += seconds
        self._length += steps
        self._run += steps
        self._since += steps
        for drafter in self._drafters.values():
            drafter.rest(steps)
            drafter.acceptance.rest(steps)
        return seconds

    def _record_rows(self, rows: int, first: bool, won: int) -> None:
        """Track how long rows stay the same, and when a plain step was timed."""
        if first and self._rows:
            self._stay += (self._run - self._stay) / 4
            self._run = 0
        self._run += 1
        self._rows = rows
        self._since += 1
        if rows > 1 and rows != self._drafted_rows:
            self._drafted_rows, self._since = rows, 1
        self._length += won
        if rows == 1:
            self._due = max(0, self._due - 1)
            if not first:
                self._timed_at, self._since_timed = self._length, 0.0
        if not self._due:
            self._want_times(2)

    def _want_times(self, steps: int) -> None:
        """Have plain steps timed if the last one was long ago."""
        if not self._knows or self._since_timed >= FRESH * self._time(1):
            self._due = steps

    def _fail(self, name: str) -> None:
        """Let a drafter rest after a proposal in vain. The rest doubles each time, until it makes up for the cost of
        a token.
        """
        drafter = self._drafter(name)
        drafter.failed += 1
        repaid = drafter.seconds(1) / (EPS / 4 * self._time(1)) if self._knows else 0.0
        drafter.resting = min(1 << min(drafter.failed, 16), round(repaid))
        drafter.why = f"{name} rests: its last {drafter.failed} proposals came to nothing"

    # --- what a step would cost and win

    @property
    def _knows(self) -> bool:
        """Whether a plain step has been timed."""
        return self._times.knows(self._of_all(1))

    def _of_all(self, rows: int) -> int:
        """Return the rows of all texts in a step with `rows` rows of this one."""
        return rows * (1 + self._beside) if self._level else rows + self._beside

    def _time(self, rows: int) -> float:
        """Return the seconds of a step of `rows` rows beside the rows of others. A plain step must have been timed."""
        return self._times(self._of_all(rows))

    def _gain(self, tokens: float) -> float:
        """Return the gain of `tokens` of this text and one for each row beside, in plain steps."""
        return (self._beside + tokens) / (self._beside + 1)

    def _left(self) -> float:
        """Return the seconds that a step may take longer than a plain one, so that the bound holds if it accepts
        nothing.
        """
        return self._budget.left(self._time(1))

    def _extra(self, rows: int, drafting: float) -> float:
        """Return the seconds that drafting and a step of `rows` rows take longer than a plain step."""
        back = 2 * self._times.switch if rows != self._rows else 0.0  # there, and back
        return drafting + self._time(rows) - self._time(1) + back

    def _is_late(self, drafter: DraftCosts) -> bool:
        """Return whether reading its unread tokens would exceed the budget."""
        return bool(drafter.unread) and self._extra(self._widths[0], drafter.unread * drafter.pace) > self._left()

    def _best(
        self,
        tokens: Shares,
        widths: Collection[int],
        drafting: Callable[[int], float] = lambda count: 0.0,
        left: float | None = None,
    ) -> _Choice:
        """Return the rows that win most tokens a second, of the numbers that the budget allows; 1 for a plain step.

        tokens: gain of a step of 1, 2 ... rows. drafting: seconds to draft a number of tokens. left: seconds that the
        step may cost beyond a plain one, by default all that the budget allows.
        """
        change = self._times.switch / max(1.0, self._stay)
        rates = {1: 1 / (self._time(1) + (change if self._rows > 1 else 0.0))}
        left, too_dear, most_tried = self._left() if left is None else left, 0.0, self._most_tried()
        kept = self._drafted_rows  # fewer must do where these exceed the budget
        spent = kept > 1 and self._extra(kept, drafting(kept - 1)) > left
        for rows in widths:
            if rows <= most_tried and not self._holds(rows, spent=spent):
                seconds = self._time(rows) + drafting(rows - 1) + (change if rows != self._rows else 0.0)
                rate = self._gain(tokens[min(rows, len(tokens)) - 1]) / seconds
                if self._extra(rows, drafting(rows - 1)) <= left:
                    rates[rows] = rate
                else:
                    too_dear = max(too_dear, rate)
        best = max(rates, key=rates.__getitem__)
        now = self._rows if self._rows in rates else 1
        if rates[best] < MARGIN * rates[now]:
            best = now
        return _Choice(best, float(rates[best]), bool(too_dear > MARGIN * rates[1]))

    def _most_tried(self) -> int:
        """Return the most rows to try: unknown numbers of rows are tried step by step, the cheapest first."""
        timed = self._times.max_rows
        more = timed * (4 if timed > 3 else 2)
        return max(self._widths[0], more // self._of_all(1) if self._level else more - self._beside)

    def _holds(self, rows: int, *, spent: bool) -> bool:
        """Return whether it is too early to change to `rows` rows. spent: the rows of now exceed the budget."""
        if not self._drafted_rows or rows == self._drafted_rows or self._since >= HOLD:
            return False
        return not spent if rows < self._drafted_rows else self._all_right < CLIMB

    def _average(self, drafter: DraftCosts) -> Shares:
        """Return the tokens that steps of 1, 2 ... rows win with average drafts of this drafter."""
        accepted = drafter.acceptance.by_position(drafter.length(self._widths[-1] - 1))
        return np.concatenate([[1.0], 1 + np.cumsum(np.cumprod(accepted))])

    def _promise(self, name: str) -> float:
        """Return the tokens a second with this drafter instead, 0 if it would not be asked."""
        drafter = self._drafter(name)
        if drafter.resting or self._is_late(drafter):
            return 0.0
        average = self._average(drafter)
        if self._best(average, self._widths, drafter.seconds).rows == 1:
            return 0.0
        hoped = FADE**drafter.idle_steps  # an expensive drafter is tried again some day
        best = self._best(average, self._widths, lambda count: hoped * drafter.seconds(count))
        return best.rate if best.rows > 1 else 0.0

    def _drafter(self, name: str) -> DraftCosts:
        if name not in self._drafters:
            self._drafters[name] = DraftCosts(name in self._serial, self._hopes.get(name, HOPE))
        return self._drafters[name]
