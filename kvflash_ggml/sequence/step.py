"""One step of a sequence: its tokens, its plan, its outputs, and its result."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from ..native.streamed import NO_MASSES, MassRequest, Streamed

if TYPE_CHECKING:
    from ..arrays import Int32s
    from ..pool.masks import Branches, SlotMask, View
    from ..pool.plan import Plan
    from ..state.session import SavedDraft
    from .copies import SavedState
    from .draft_rows import DraftRows
    from .query_ring import QueryRing

AfterStep = Callable[[int, int], None]
"""Called as (start, count) once a text has the tokens of a step, while their logits are available."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The outputs of a step: logits of every token, or of the last. wanted: attention scores, if it is streamed."""

    every: bool
    last: bool
    wanted: MassRequest = NO_MASSES


EVERY = Output(every=True, last=True)
LAST = Output(every=False, last=True)


@dataclass(slots=True)  # not frozen: see `Step`
class Logits:
    """The positions whose logits are available: `count` from `start` on, in rows of the newest step.

    first: the row of the first of them; from the end, if it is negative. path: their rows, if these are not in order.
    """

    start: int = 0
    count: int = 0
    first: int = -1
    path: tuple[int, ...] = ()

    def row(self, pos: int) -> int | None:
        """Return the row of a position, None if its logits are not available."""
        at = pos - self.start
        if not 0 <= at < self.count:
            return None
        return self.path[at] if self.path else self.first + at

    def before(self, length: int) -> Logits:
        """Return these logits without positions from `length` on."""
        return replace(self, count=max(0, min(self.count, length - self.start)))


NO_LOGITS = Logits()


@dataclass(slots=True)  # one for each token: freezing it would take longer than setting its fields
class Step:
    """One step of a sequence: `Sequence.prepare` makes it, `Pool.run` computes it, `Sequence.commit` makes it count.

    seq: the sequence. start: position of the first token. mask, queries: of the sequence. view: the chunks that the
    step sees in place of the pool. whole: it sees all of the text before it. after: called when it is committed.
    generated: its tokens are of an answer. ahead: its tokens are draft rows, and there is room for so many; 0 if they
    are of the text. branches: the rows of a tree. before: the draft rows that it follows. state: recurrent state before
    the draft rows; None if the memory can roll back by itself. wait: the transfer that must be done before it is
    computed. streamed: the images of `view` while it runs. first: its first row among the steps that run with it.
    codes: the results of llama_decode; empty until it has run. likeliest: the likeliest token of each row with logits,
    where it was computed.
    """

    seq: int
    start: int
    tokens: Int32s
    output: Output
    plan: Plan
    mask: SlotMask
    queries: QueryRing
    view: View | None = None
    whole: bool = True
    after: AfterStep | None = None
    generated: bool = False
    ahead: int = 0
    branches: Branches | None = None
    before: DraftRows | None = None
    state: SavedState | None = None
    wait: int = 0
    streamed: Streamed | None = None
    first: int = 0
    codes: list[int] = field(default_factory=list)
    likeliest: list[int] = field(default_factory=list)


class Unfinished:
    """Holds the function that completes or undoes the change under way. The function can be repeated.

    An interrupt can come between any two statements. So a change first sets `work`, and then acts. The next call
    settles the work that is left.
    """

    def __init__(self) -> None:
        self.work: Callable[[], None] | None = None

    def settle(self) -> None:
        """Call `work`, if any, and clear it. After an interrupt `work` runs once more before the interrupt goes on."""
        if self.work is None:
            return
        try:
            self.work()
        except Exception:
            self.work = None  # it would fail again
            raise
        except BaseException:
            self.work()
            self.work = None
            raise
        self.work = None


class Follower(Protocol):
    """Is told of every change of a text. Each call can be repeated after an interrupt."""

    def evaluated(self, start: int, tokens: Int32s, *, ahead: bool) -> None:
        """A step has computed these tokens; ahead: they are draft rows."""
        ...

    def retained(self, length: int) -> None:
        """The draft rows of the newest step end at `length`: other rows will follow there.

        The rows of a self-draft are never accepted: an empty path settles them.
        """
        ...

    def settled(self, path: abc.Sequence[int]) -> None:
        """The draft rows of `path` have joined the text, in this order; the other draft rows are gone."""
        ...

    def truncated(self, length: int) -> None:
        """The text has `length` tokens left."""
        ...

    def state(self) -> abc.Sequence[SavedDraft]:
        """Return the drafters' states for the text, to be loaded later. They go on unchanged."""
        ...

    def load(self, saved: abc.Sequence[SavedDraft], tokens: Int32s) -> None:
        """Continue with a restored text of these tokens, after it was cut to nothing. States that do not fit are
        ignored.
        """
        ...
