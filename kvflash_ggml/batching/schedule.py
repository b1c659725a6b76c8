"""Who has the next step, and who leaves its slot: pure functions. No thread, no clock, no model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

SHARE = 0.5
"""Tokens of newer prompts that may be read between the steps of an older one, as a share of what it has read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """What a running answer wants of the next step.

    reads: a step of its prompt, of which `left` tokens are to be read and `done` were read for it. A text that was lost
    within its answer is read like a prompt. shares: one step for all of its prompt, which other prompts can share. Else
    its next token. let: tokens of newer prompts that were read between its steps. priority: of its request.
    """

    reads: bool = False
    shares: bool = False
    left: int = 0
    done: int = 0
    let: int = 0
    priority: int = 0


def schedule(wants: Sequence[Want], *, rows: int, owed: bool) -> list[int]:
    """Return which answers have the next step, by their places in `wants`, which are in the order of their beginning.

    One prompt that takes several steps is read at a time, and all other answers share a step. owed: a prompt has had
    the last step, and the answers that wait for their next token are to have theirs. rows: most tokens of a step of a
    prompt.
    """
    readers = [at for at, want in enumerate(wants) if want.reads]
    others = [at for at, want in enumerate(wants) if not want.reads]
    if not readers or (others and owed) or any(wants[at].shares for at in others):
        return others
    first, *newer = sorted(readers, key=lambda at: -wants[at].priority)  # the oldest of the highest priority
    passing = [at for at in newer if passes(wants[at], wants[first], rows=rows)]
    return [min(passing, key=lambda at: wants[at].left, default=first)]


def passes(newer: Want, older: Want, *, rows: int) -> bool:
    """Return whether a prompt has the next step before an older one.

    Of two priorities the higher one has it. Of one, the newer must be shorter than what is left of the older: otherwise
    both would end later. And newer prompts together have a share of the tokens.
    """
    if newer.priority != older.priority:
        return newer.priority > older.priority
    return newer.left < older.left and older.let + min(newer.left, rows) <= SHARE * older.done


LEAST_TURN_S = 2.0
"""An answer decodes for so many seconds before it gives its slot to a request that waits."""

SWAPS = 20
"""And for so many times what it takes to swap its text out and in again, so that turns cost 5 % of the time at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a running answer has had of its slot.

    held: seconds since it drew the first token of this turn; None before, and while its text is read. swap_s: seconds
    to swap its text out and in again. priority: of its request.
    """

    held: float | None
    swap_s: float = 0.0
    priority: int = 0

    @property
    def over(self) -> float:
        """Seconds that the answer has decoded beyond its turn; below 0 while that lasts."""
        return -1.0 if self.held is None else self.held - max(LEAST_TURN_S, SWAPS * self.swap_s)


def gives_way(turns: Sequence[Turn]) -> int | None:
    """Return which answer is swapped out for a request that waits where no slot is free, by its place in `turns`.

    Of the lowest priority, the one that has decoded longest beyond its turn. None while all turns last.
    """
    ended = [at for at, turn in enumerate(turns) if turn.over > 0]
    return min(ended, key=lambda at: (turns[at].priority, -turns[at].over), default=None)


def groups(steps: Sequence[tuple[T, int]], limit: int) -> Iterator[list[T]]:
    """Yield what is computed in one step each, of at most `limit` rows in all. steps: each with its rows."""
    group: list[T] = []
    total = 0
    for step, rows in steps:
        total += rows
        if group and total > limit:
            yield group
            group, total = [], rows
        group.append(step)
    if group:
        yield group
