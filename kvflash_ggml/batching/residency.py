"""What is resident, as it changes, for those who look on. Written on the engine's thread, read on any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..arrays import Floats
from ..policy.qk import Reason

MAX_RECALLED = 256
"""Chunks of one answer whose coming is told; the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """number: grows with each change. recalled: chunks that came back for the answer at hand, and why if it is known.

    scores: of the newest look, log shares of attention.
    """

    number: int = 0
    length: int = 0
    resident: tuple[int, ...] = ()
    recalled: dict[int, Reason | None] = field(default_factory=dict)
    scores: Floats | None = None
    evicted_mass: float | None = None
    generating: bool = False


class ResidencyObserver:
    """A `trace.Observer`. reasons: why chunks are at the top of a look's scores."""

    def __init__(self, reasons: Callable[[Floats], Sequence[Reason]]) -> None:
        self._reasons = reasons
        self._known: dict[int, Reason] = {}
        self.now = Residency()

    def begin(self) -> None:
        """Another answer: what came back for the last one is no news."""
        self._known = {}
        self._set(recalled={})

    def changed(
        self,
        *,
        length: int,
        resident: Sequence[int],
        recalled: Sequence[int],
        scores: Floats | None,
        evicted_mass: float | None,
        generating: bool,
    ) -> None:
        if not length:  # the text may be another from here on
            self._known, self.now = {}, Residency(number=self.now.number)
        came = dict(self.now.recalled)
        if scores is not None:
            self._known.update({reason.chunk: reason for reason in self._reasons(scores)})
        for chunk in recalled:
            came.pop(chunk, None)
            came[chunk] = self._known.get(chunk)
        while len(came) > MAX_RECALLED:
            del came[next(iter(came))]
        self._set(
            length=length,
            resident=tuple(resident),
            recalled=came,
            scores=self.now.scores if scores is None else scores,
            evicted_mass=self.now.evicted_mass if evicted_mass is None else evicted_mass,
            generating=generating,
        )

    def _set(self, **changes: object) -> None:
        before = self.now
        values = {name: getattr(before, name) for name in Residency.__slots__}
        self.now = Residency(**{**values, **changes, "number": before.number + 1})
