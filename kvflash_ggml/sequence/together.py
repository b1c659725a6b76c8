"""Steps of several texts on one pool, computed in one step of the engine. What goes wrong with one is its own."""

from __future__ import annotations

from collections.abc import Sequence

from ..constants import CHUNK
from ..errors import DeviceLost, NotFinite
from .sequence import Sequence as Text
from .step import NO_LOGITS, Step

Prepared = tuple[Text, Step]


def compute(prepared: Sequence[Prepared], *, again: bool = True) -> list[Exception | None]:
    """Compute prepared steps of different texts on one pool together, at most `n_ubatch` tokens in all.

    With recurrent state (`engine.info.recurrent`) all of them have equally many tokens: a prompt is read beside nobody.

    Returns what went wrong with each step, None where its text has its tokens. Any other text is as it was before.

    If the engine refuses the step, or logits of a text are not finite, the steps in question are undone, their slots
    are zeroed, and each is computed again alone, unless recurrent state had to go back further. Logits are at hand
    until the next step on the pool. Prompt steps without logits are not checked. A step that streams, or verifies a
    tree, is the only one: the stages hold one text.

    again: False where tokens are drawn from the logits of other texts first. The caller then computes each step without
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
    """Compute steps together, and note by sequence what went wrong."""
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
        spoiled = _spoiled(ready) if ready[0][1].codes == [0] else ready
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
            if text.length != step.start:
                continue  # recurrent state has gone back further: these tokens follow no more
            step.codes, step.wait = [], 0
            if again:
                errors.pop(step.seq)
                _attempt([(text, step)], errors, again)


def _spoiled(ready: Sequence[Prepared]) -> list[Prepared]:
    """The steps with logits that are not finite. Waits for the compute."""
    return [] if _are_finite(ready) else [one for one in ready if not _are_finite([one])]


def _are_finite(ready: Sequence[Prepared]) -> bool:
    """Look at all rows in one call: with 16 texts, calls of one row each would take a twentieth of a step's Python.

    The likeliest tokens are noted, since logits take long to look at.
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
    """A step comes to nothing. No kernel may meet its rows, which another text does not see: they are zeroed."""
    errors[step.seq] = why
    if step.codes and not isinstance(why, DeviceLost):
        layout, at, end = step.plan.layout, step.start, step.start + len(step.tokens)
        while at < end:
            size = min(CHUNK - at % CHUNK, end - at)
            text.engine.zero_cells(layout.slot_of(at), size)
            at += size
    if step.codes:
        text.logits = NO_LOGITS
    text.fail(step, why)


def _count(text: Text, step: Step, errors: dict[int, Exception]) -> None:
    """A step counts. What fails behind it is told; its tokens are of the text all the same."""
    try:
        text.commit(step)
        if step.generated and not step.ahead:
            text.count_generated(len(step.tokens))
    except Exception as err:
        errors[step.seq] = err
