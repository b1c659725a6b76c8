"""Computes steps of several texts on one pool in one step of the engine. An error of one text stays its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import DeviceLost, NotFinite
from .step import Step

if TYPE_CHECKING:
    from .sequence import Sequence as Text

Prepared = tuple["Text", Step]


def compute(prepared: Sequence[Prepared], *, again: bool = True) -> list[Exception | None]:
    """Compute prepared steps of different texts on one pool together, at most `n_ubatch` tokens in all.

    With recurrent state (`engine.info.recurrent`) all steps have equally many tokens: a prompt is read alone.

    Returns the error of each step, None where its text has its tokens. A text with an error is as it was before.

    If the engine refuses the step, or logits of a text are not finite, these steps are undone and their slots zeroed:
    some kernels spread such values over all texts of a step. Then each is computed again alone, unless recurrent state
    had to roll back further. Logits are available until the next step on the pool. A step that streams, or verifies a
    tree, is the only one: the layer buffers hold one text.

    again: False if the caller first draws tokens from the logits of other texts. It then computes each step without
    `codes` alone.
    """
    assert len(prepared) == 1 or all(step.view is None and step.branches is None for _, step in prepared)
    errors: dict[int, Exception] = {}
    try:
        _attempt(prepared, errors, again)
    except BaseException:
        for text, step in prepared:
            if text.unfinished.work is not None:
                text.commit(step)
        raise
    return [errors.get(step.seq) for _, step in prepared]


def _attempt(prepared: Sequence[Prepared], errors: dict[int, Exception], again: bool) -> None:
    """Compute steps together, and note errors by sequence."""
    ready: list[Prepared] = []
    for text, step in prepared:
        try:
            text.apply(step)
            ready.append((text, step))
        except Exception as err:
            _fail(text, step, err, errors)
    if not ready:
        return
    try:
        if len(ready) == 1:
            ready[0][0].run(ready[0][1])
        else:
            ready[0][0].pool.run([step for _, step in ready])
        why: Exception | None = None
        if ready[0][1].codes == [0]:
            spoiled = [] if _are_finite(ready) else [one for one in ready if not _are_finite([one])]
        else:
            spoiled = ready
    except Exception as err:
        why, spoiled = err, ready
    for text, step in spoiled:
        step.codes = [-1]
        _fail(text, step, why or NotFinite(f"the logits of sequence {step.seq} are not finite"), errors)
    for text, step in ready:
        if step.codes == [0]:
            _count(text, step, errors)
    if len(ready) > 1 and not isinstance(why, DeviceLost):
        for text, step in spoiled:
            if text.table.layout.length != step.start:
                continue  # recurrent state rolled back further: these tokens no longer follow
            step.codes, step.wait = [], 0
            if again:
                errors.pop(step.seq)
                _attempt([(text, step)], errors, again)


def _are_finite(ready: Sequence[Prepared]) -> bool:
    """Wait for the compute, check all rows in one call, and note the likeliest tokens.

    With 16 texts, calls of one row each would take a twentieth of a step's Python time.
    """
    rows: list[int] = []
    begins: list[tuple[Step, int]] = []
    for _, step in ready:
        end = step.first + len(step.tokens)
        if step.output.every or step.output.last:
            begins.append((step, len(rows)))
            rows += range(step.first if step.output.every else end - 1, end)
    if rows:
        try:
            tokens = ready[0][0].engine.argmax(rows).tolist()
        except NotFinite:
            return False
        for step, at in begins:
            step.likeliest = tokens[at : at + (len(step.tokens) if step.output.every else 1)]
    return True


def _fail(text: Text, step: Step, why: Exception, errors: dict[int, Exception]) -> None:
    """Undo a step, and note its error."""
    errors[step.seq] = why
    text.fail(step, why)


def _count(text: Text, step: Step, errors: dict[int, Exception]) -> None:
    """Commit a step. A later error is noted; the text has its tokens all the same."""
    before = text.length  # with tokens that are lost, which have been counted
    try:
        text.commit(step)
        text.unchecked = text.unchecked and not step.likeliest
        if step.generated and not step.ahead:
            text.count_generated(text.length - before)
    except Exception as err:
        errors[step.seq] = err
