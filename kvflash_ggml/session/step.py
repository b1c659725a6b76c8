"""One step of a text, as values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..arrays import Int32s
from ..pool.plan import Plan
from ..pool.view import View

AfterStep = Callable[[int, int], None]
"""Called as (start, count) once a text has the tokens of a step, while their logits are at hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Which logits of a step are kept: of every token, or of the last."""

    every: bool
    last: bool


EVERY = Output(every=True, last=True)
LAST = Output(every=False, last=True)


@dataclass(slots=True)  # one is made for each token: freezing it would take longer than all of its fields
class Step:
    """start: position of the first token. ahead: its rows are not of the text before they are accepted. view: what it
    sees in place of the pool. whole: it sees the whole text before it.

    codes: what llama_decode has answered; empty until it has run.
    """

    start: int
    tokens: Int32s
    output: Output
    plan: Plan
    ahead: bool = False
    view: View | None = None
    whole: bool = True
    codes: list[int] = field(default_factory=list)

    @property
    def computed(self) -> bool:
        """Does the device hold its tokens?"""
        return self.codes == [0]


@dataclass(frozen=True, slots=True)
class Ahead:
    """Rows that were written ahead of the text, from position `start` on.

    state: what is not pooled, as it was before them; None if it can go back by itself. streamed: did they see more than
    the pool?
    """

    start: int
    tokens: Int32s
    state: bytes | bytearray | None
    streamed: bool
