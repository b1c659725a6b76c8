"""Reports changes of a page table to an observer, and estimates the share of attention that misses the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..arrays import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of the page table, or a score of the text.

    length: tokens evaluated once the step is done. resident: chunks in the pool. recalled: chunks paged in. scores: the
    scores that were just used, one per chunk. evicted_mass: estimated share of attention on chunks that are not in
    `resident`, where a policy can tell. generating: the step computes one token of an answer.
    """

    length: int
    resident: Sequence[int]
    recalled: Sequence[int] = ()
    scores: Floats | None = None
    evicted_mass: float | None = None
    generating: bool = False


class Observer(Protocol):
    """Is told of every change."""

    def changed(self, change: Change) -> None: ...


class Events:
    """Connects a sequence with an observer. scorer: may have `shares_of(scores)`, as the default policy has."""

    def __init__(self, scorer: object) -> None:
        self.observer: Observer | None = None
        self._shares_of: Callable[[Floats], Floats | None] | None = getattr(scorer, "shares_of", None)
        self.scores: Floats | None = None
        """Scores that are in use and that `changed` has not reported yet."""
        self._total = 0.0
        self._count = 0

    @property
    def evicted_mass(self) -> float | None:
        """Mean over the scores of the newest answer, from its prompt's end on; None if nothing was measured."""
        return self._total / self._count if self._count else None

    def score(self, scores: Floats) -> None:
        """Note scores that are in use now; a change of the page table may follow."""
        self.scores = scores

    def changed(self, length: int, resident: Sequence[int], recalled: Sequence[int] = (), *, generating: bool) -> None:
        """Report that the page table has changed, or has stayed as it was after a score."""
        scores, self.scores = self.scores, None
        mass = None if scores is None else self._weigh(scores, resident, generating=generating)
        if self.observer is not None:
            self.observer.changed(
                Change(
                    length=length, resident=resident, recalled=recalled, scores=scores, evicted_mass=mass,
                    generating=generating,
                )
            )  # fmt: skip

    def truncated(self, length: int, resident: Sequence[int]) -> None:
        """Report that the text was cut or replaced. A change for scores that were noted may still follow."""
        if self.observer is not None:
            self.observer.changed(Change(length=length, resident=resident))

    def reset(self) -> None:
        """Forget the text."""
        self.scores = None
        self._total, self._count = 0.0, 0

    def _weigh(self, scores: Floats, resident: Sequence[int], *, generating: bool) -> float | None:
        shares = self._shares_of(scores) if self._shares_of is not None else None
        if shares is None:
            return None
        mass = evicted_share(shares, resident)
        if not generating:  # of a prompt only its last scores count
            self._total, self._count = 0.0, 0
        self._total += mass
        self._count += 1
        return mass


def evicted_share(shares: Floats, resident: Sequence[int]) -> float:
    """Return the sum of the shares of the evicted chunks. Chunks newer than the shares count as nothing."""
    inside = [c for c in resident if c < len(shares)]
    return min(1.0, max(0.0, float(1.0 - shares[inside].sum(dtype=np.float64))))
