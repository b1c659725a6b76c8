"""One step of a session: it is computed and counts, or it has never been."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..arrays import Int32s
from ..pool.plan import Plan

if TYPE_CHECKING:
    from ..native.engine import Engine
    from .session import Session

AfterStep = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Which logits of a step are kept: of every token, or of the last."""

    every: bool
    last: bool


@dataclass(frozen=True, slots=True)
class Step:
    """start: position of the first token. codes: what llama_decode has answered; empty until it has run."""

    start: int
    tokens: Int32s
    output: Output
    plan: Plan
    codes: list[int] = field(default_factory=list)

    @property
    def computed(self) -> bool:
        """Does the device hold its tokens?"""
        return self.codes == [0]


def evaluate(
    session: Session, tokens: Int32s, output: Output, after: AfterStep | None, *, generated: bool = False
) -> None:
    """Read tokens that fit one step. Whatever goes wrong, the session has all of them then, or none.

    after(start, count) is called once the session has them, and again if that was interrupted.
    """
    if session.bounded:
        session.paging.save()
    plan = session.pager.reserve(session.length, len(tokens), reselect=session.reselect_due)
    step = Step(session.length, tokens, output, plan)
    session.unfinished.begin(partial(_end, session, step))
    try:
        _run(session, step, generated=generated)
        _follow(session, step, after)
    except BaseException as err:
        if isinstance(err, Exception):
            session.reselect_due = False  # or what cannot be recalled would be asked for at every step
        _follow(session, step, after)
        raise


def _run(session: Session, step: Step, *, generated: bool) -> None:
    engine, watch, plan = session.engine, session.watch, step.plan
    start, n = step.start, len(step.tokens)
    session.paging.apply(plan.moves, start)
    if watch.looked or (plan.moves and watch.observer is not None):
        recalled = [chunk for chunk, _ in plan.moves.recall]
        watch.changed(start + n, plan.layout.resident_chunks, recalled, generating=generated)
    session.mask.fill(start, plan.layout.slots(start, engine.slot[:n]))
    engine.token[:n] = step.tokens
    engine.pos[:n] = np.arange(start, start + n) if n > 1 else start
    _keep_queries(engine, start, n)
    engine.output[:n] = step.output.every
    engine.output[n - 1] = step.output.every or step.output.last
    engine.step(n, session.paging.wait, step.codes)


def _keep_queries(engine: Engine, start: int, n: int) -> None:
    """The newest tokens keep their queries: that of position p is in row p % query_rows."""
    rows = engine.info.query_rows
    if rows and n == 1:
        engine.query_row[0] = start % rows
    elif rows:
        kept = min(n, rows)
        engine.query_row[: n - kept] = -1
        engine.query_row[n - kept : n] = np.arange(start + n - kept, start + n) % rows


def _follow(session: Session, step: Step, after: AfterStep | None) -> None:
    """A step is over: what has to follow it if it is done, which can be done again."""
    session.settle()
    if step.computed and after is not None:
        after(step.start, len(step.tokens))
    if step.computed and session.bounded:
        session.paging.save()


def _end(session: Session, step: Step) -> None:
    """A step that was computed counts, also if it was interrupted then; of another one nothing stays."""
    if step.computed:
        session.ids[step.start : step.start + len(step.tokens)] = step.tokens
        session.has_logits = step.output.every or step.output.last
        session.reselect_due = False
        session.paging.wait = 0
        session.pager.commit(step.plan)
        return
    session.paging.undo(step.plan.moves)
    session.mask.rewind()
    if step.codes:
        session.queries_from = session.length  # it may have captured some before it failed
    if not session.engine.truncate(session.length):  # recurrent state has gone on: an earlier one is known
        cut = partial(session.cut_to, session.length, direct=False)
        session.unfinished.begin(cut)
        cut()
    session.watch.cut(session.length, session.pager.resident_chunks)
