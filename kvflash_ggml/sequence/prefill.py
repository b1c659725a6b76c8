"""Reads prompts: as they were read before, exactly, by the pool with the end a second time, or several in one step."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..constants import CHUNK
from ..errors import KVFlashError
from ..media.rows import are_mutual
from ..native.streamed import NO_MASSES, MassRequest
from ..state.statistics import Replay
from .reading import ReadStats
from .step import EVERY, LAST, AfterStep, Output, Step

if TYPE_CHECKING:
    from ..arrays import Int32s
    from ..logs import Progress
    from ..pool.page_table import PageTableState
    from .sequence import Sequence

QUESTION_TOKENS = 64
"""Tokens at the end of a prompt that count as its question. The pool evaluates them twice: first to score, then with
the chunks they ask for.
"""

LEFT_OVER = 16
"""Tokens before the question that are evaluated with it where a prompt has no more: the newest token of the last
answer, and marks of a template. A step of their own would take as long, and the state after them would have to be
kept.
"""


Pieces = Generator[Step | None, None, None]
"""The steps of a reading: each is computed before the next call, and an error of that is thrown in here. None: between
two of them, where steps of other texts may come.
"""


@dataclass(frozen=True, slots=True)
class Before:
    """A text as it is before a step. table: with the scores of the step. rebuild: see `Relevance`."""

    start: int
    table: PageTableState
    rebuild: bool

    @classmethod
    def of(cls, text: Sequence) -> Before:
        table = replace(text.table.state(text.relevance.ranking), pins=frozenset())  # pins belong to a request
        return cls(text.length, table, text.relevance.rebuild)


@dataclass(slots=True)
class Prefill:
    """One prompt, and how many of its tokens a text has read (`done`). step: of `prepare`. The other fields are
    arguments of `pieces`.
    """

    text: Sequence
    tokens: Int32s
    output_all: bool
    after: AfterStep | None
    progress: Progress | None
    checkpoint: int | None
    done: int = 0
    step: Step = field(init=False)
    total: int = field(init=False)
    stretches: list[int] = field(init=False)
    """Where batches of tokens and of media end."""

    def __post_init__(self) -> None:
        self.total = len(self.tokens)
        self.stretches = [self.total] if self.tokens.min() >= 0 else list(self.text.pool.media.stretches(self.tokens))

    def read(self, replay: Replay | None) -> Pieces:
        """Evaluate the prompt. replay: its ending, if it was read before."""
        self._forget()
        if replay is not None:
            yield from self._replay(replay)
        elif self.text.reading.exact:
            yield from self._read_exactly()
        else:
            yield from self._read_by_pool()

    def _forget(self) -> None:
        """Forget the request before."""
        self.text.relevance.forget()
        self.text.stats = ReadStats()

    # --- one step, with other prompts

    def prepare(self) -> bool:
        """Prepare `step`, which has the whole prompt. `finish` follows once it was computed.

        False if the prompt takes more steps, if its question is evaluated twice, or if it is known.
        """
        text, scoring, exact = self.text, self.text.scoring, self.text.reading.exact
        fits = self.total <= min(text.n_ubatch, text.n_batch, text.table.room(text.length)) and self.tokens.min() >= 0
        known = scoring is not None and not exact and scoring.replays.at(text.length, self.tokens) is not None
        if not fits or known or (not exact and self._question_size() > 0):
            return False
        self._forget()
        self.step = text.prepare(self.tokens, self._logits, self.after, stream=exact)
        return self.step.view is None and (self.step.whole or not exact)

    def finish(self) -> None:
        """Count the tokens of `step`, and score the chunks."""
        relevance = self.text.relevance
        self._count(self.total)
        if relevance.scoring is not None:
            relevance.request(self.text.tokens, None, rows=None)
            if self.text.reading.exact:
                relevance.take(relevance.scoring.take())
        self._report()

    # --- three readers

    def _replay(self, replay: Replay) -> Pieces:
        """Evaluate a known prompt ending with the residency it had the first time: the same question gets the same
        answer.
        """
        text, relevance = self.text, self.text.relevance
        assert relevance.scoring is not None
        with text.recovery.told():
            text.checkpoints.before_step(text.length, wanted=True)
        relevance.ranking, relevance.rebuild = replay.table.scores, replay.rebuild
        yield text.prepare(replay.tokens, self._logits, self.after, places=replay.table)
        relevance.ranking, relevance.rebuild = replay.ranking, replay.due
        relevance.scoring.replays.keep(replay)
        self._count(self.total)
        self._report()

    def _read_exactly(self) -> Pieces:
        """Evaluate the prompt with the whole text in view, or as much of it as the layer buffers hold."""
        text, scoring = self.text, self.text.relevance.scoring
        rescore = self._reselects and text.length + self.total > text.span.tokens
        while self.done < self.total:
            end = self._batch_end(self.total)
            count = self._next(end, spare=rescore)
            last = self.done + count == self.total
            wanted = text.relevance.ask(text.length + count) if last else NO_MASSES
            yield from self._step(count, rescore=rescore, wanted=wanted, stream=True)
        if scoring is not None:
            text.relevance.take(scoring.take())  # the answer begins with the chunks that the prompt's end asks for
            if not text.sees_everything:
                text.stats.ranked, text.stats.ranked_why = scoring.masses.ranked

    def _read_by_pool(self) -> Pieces:
        """Evaluate the prompt with the resident chunks in view, then its question again with the chunks it asks for."""
        last = self.total
        # once more before each step: the text may have lost blocks to others since
        while self.done < (last := min(last, max(self.done, self.total - self._question_size()))):
            yield from self._step(self._next(self._batch_end(last), spare=self._reselects), rescore=self._reselects)
        before: Before | None = None
        while self.done < self.total:
            count = self._next(self.total, question=True)
            before = Before.of(self.text)
            yield from self._step(count, rescore=self._reselects)
        if before is not None:
            yield from self._reread_question(self.tokens[last:], before)

    # --- steps

    @property
    def _logits(self) -> Output:
        """The logits that a step at the end of the prompt keeps."""
        return EVERY if self.output_all else LAST

    @property
    def _reselects(self) -> bool:
        """Whether chunks are scored, and pages moved, after each step."""
        return self.text.relevance.scoring is not None and self.text.config.reselect_prefill

    def _batch_end(self, last: int) -> int:
        """Return where stock llama.cpp would end the running batch, `last` at most. Media have batches of their own."""
        n_batch, begin, end = self.text.n_batch, 0, self.total
        for end in self.stretches:
            if self.done < end:
                break
            begin = end
        return min(last, end, begin + ((self.done - begin) // n_batch + 1) * n_batch)

    def _next(self, end: int, *, spare: bool = False, question: bool = False) -> int:
        """Prepare the next step, which ends at token `end` of the prompt at most. Returns its number of tokens.

        spare: pages may move within it. question: it is evaluated again, so no checkpoint within it is of use.
        """
        text, checkpoint = self.text, self.checkpoint
        start = text.length
        count = min(text.n_ubatch, end - self.done, text.table.room(start, spare=spare))
        if are_mutual(self.tokens[self.done : end]):
            count = end - self.done  # rows that see each other need one step; the pool refuses it if it has no room
        media = self.tokens.item(self.done) < 0  # a checkpoint within an image is useless: texts are cut at its ends
        if checkpoint is not None and not question and not media and start < checkpoint < start + count:
            count = checkpoint - start
        if text.engine.whole(start, seq=text.seq) == start:
            with text.recovery.told():
                text.checkpoints.before_step(start, wanted=self.done + count == self.total or start == checkpoint)
        text.relevance.take_overlapped()
        return count

    def _step(self, count: int, *, rescore: bool, wanted: MassRequest = NO_MASSES, stream: bool = False) -> Pieces:
        """Evaluate the next `count` tokens."""
        text, relevance, start = self.text, self.text.relevance, self.text.length
        output = Output(every=self.output_all, last=True, wanted=wanted)  # each step tells whether it is finite
        with nullcontext() if relevance.scoring is None else relevance.scoring.before_seals(wanted):
            yield text.prepare(self.tokens[self.done : self.done + count], output, self.after, stream=stream)
            self._count(count)
            finished = self.done == self.total
            if rescore or (finished and relevance.scoring is not None):
                relevance.request(text.tokens, text.view, rows=None if finished else 1, wanted=wanted, start=start)
        self._report()
        if not finished:
            yield None

    def _count(self, count: int) -> None:
        """Count the tokens of a finished step."""
        text = self.text
        text.stats.add_read(count, self._share_seen(count))
        self.done += count

    def _share_seen(self, count: int) -> float:
        """Return the share of the text before it, 0 to 1, that the newest step of `count` tokens saw."""
        text, start = self.text, self.text.length - count
        if text.whole[start]:
            return 1.0
        seen = text.table.resident * CHUNK - count if text.view is None else text.view.tokens
        return seen / start

    def _report(self) -> None:
        """Call the progress callback. KVFlashError if it changes the text."""
        if self.progress is None:
            return
        length = self.text.length
        self.progress(self.done, self.total)
        if self.text.length != length:
            raise KVFlashError("the text was changed by the progress callback while it was read: read it again")

    # --- the question

    def _question_size(self) -> int:
        """Return how many of the prompt's last tokens are evaluated twice; 0 where nothing could be recalled for
        them.
        """
        text, total = self.text, self.total
        info = text.engine.info
        outgrown = text.length - self.done + total > text.table.quota * CHUNK or not text.sees_everything
        pageable = text.relevance.scoring is not None and outgrown
        can_go_back = text.config.checkpoints > 0 or not (info.recurrent or info.n_swa > 0)
        if not pageable or not can_go_back:
            return 0
        size = min(total if total <= QUESTION_TOKENS + LEFT_OVER else QUESTION_TOKENS, text.n_ubatch)
        media = np.flatnonzero(self.tokens[total - size :] < 0)
        return size - (int(media[-1]) + 1 if len(media) else 0)

    def _reread_question(self, tokens: Int32s, before: Before) -> Pieces:
        """Recall the chunks that the end of the prompt asks for, and evaluate it again, so that its logits have seen
        them.

        before: the text before the last step that read the question.
        """
        text, relevance = self.text, self.text.relevance
        assert relevance.scoring is not None
        start = text.length - len(tokens)
        ranking = relevance.scoring.take()
        relevance.take(ranking)
        if ranking is not None and text.table.would_recall(start, ranking):
            left = text.truncate(start)
            assert left == start, "a checkpoint is taken before the last step of a prompt"
            relevance.ranking, relevance.rebuild = ranking, True
            before = Before.of(text)
            yield text.prepare(tokens, self._logits, self.after)
        elif ranking is not None:
            text.events.changed(text.length, text.table.resident_chunks, generating=False)
        found = Replay(
            start=before.start,
            tokens=text.tokens[before.start :].copy(),
            table=before.table,
            rebuild=before.rebuild,
            ranking=relevance.ranking,
            due=relevance.rebuild,
        )
        relevance.scoring.replays.keep(found)


def pieces(
    sequence: Sequence,
    tokens: Int32s,
    *,
    output_all: bool = False,
    after: AfterStep | None = None,
    progress: Progress | None = None,
    checkpoint: int | None = None,
    prompt: bool = False,
) -> Pieces:
    """Evaluate tokens after the text: one as part of an answer, several as a prompt.

    Logits of the last token are kept, or of all with `output_all`. after(start, count) runs after each step, while the
    logits of its `count` tokens are available. checkpoint: a position within a prompt at which to keep a checkpoint.
    prompt: a single token is part of a prompt too. progress(done, total) runs after each step of a prompt, and may not
    change the text. After DecodeError and other errors of this package the finished steps stay: `length` tells how far.
    """
    sequence.begin(len(tokens))
    if not len(tokens):  # the text stays as it is
        sequence.stats = ReadStats()
        return
    replay = None
    if sequence.scoring is not None and not sequence.reading.exact and (prompt or len(tokens) > 1):
        replay = in_one_step(sequence, sequence.scoring.replays.at(sequence.length, tokens))
    if len(tokens) == 1 and not prompt:
        yield sequence.prepare_answer(tokens, EVERY if output_all else LAST, after)
        return
    yield from Prefill(sequence, tokens, output_all, after, progress, checkpoint).read(replay)


def computed(reading: Pieces, compute: Callable[[Step], None]) -> Pieces:
    """Yield what a reading yields, and compute each step when the caller goes on."""
    error: BaseException | None = None
    try:
        while True:
            try:
                step = next(reading) if error is None else reading.throw(error)
            except StopIteration:
                return
            error = None
            yield step
            try:
                if step is not None:
                    compute(step)
            except BaseException as err:
                error = err
    finally:
        error = None  # its traceback has this frame: a cycle would keep the model
        reading.close()


def compute(sequence: Sequence, step: Step) -> None:
    """Compute a step of `pieces` alone."""
    if step.generated:
        sequence.finish(step)
    else:
        sequence.compute(step)


def extend(sequence: Sequence, tokens: Int32s, **how: Any) -> None:
    """Evaluate tokens, step by step. Arguments: those of `pieces`."""
    for _ in computed(pieces(sequence, tokens, **how), partial(compute, sequence)):
        pass


def may_share(sequence: Sequence, count: int) -> bool:
    """Return whether a prompt of `count` tokens may share a step with other prompts, if one step is enough for it."""
    info = sequence.engine.info
    return 0 < count <= sequence.pool.n_ubatch // 2 and not (sequence.config.same_bits or info.recurrent or info.n_swa)


def rewind_to(sequence: Sequence, length: int) -> None:
    """Forget tokens from `length` on, and evaluate the tokens again that the memory could not keep."""
    again = sequence.ids[:length].copy()
    left = sequence.truncate(length)
    if left < length:
        extend(sequence, again[left:])


def prefix_to_keep(sequence: Sequence, shared: int, prompt: Int32s) -> int:
    """Return how much of a known prefix to keep for a prompt.

    It is less than `shared` where the prompt's end was read before, or where a text that is cut off has overwritten
    queries of the prefix's newest tokens. These tokens are evaluated again, so that the whole question takes part in
    scoring.
    """
    total, rows = len(prompt), sequence.queries.rows
    if sequence.scoring is not None and not sequence.reading.exact:
        found = in_one_step(sequence, sequence.scoring.replays.within(shared, prompt))
        if found is not None and sequence.truncates_to(found.start) == found.start:
            return found.start
    valid_from = sequence.queries.valid_after(min(shared, sequence.length), sequence.length)
    if sequence.scoring is None or total <= sequence.table.quota * CHUNK or valid_from <= total - rows:
        return shared
    return max(0, min(shared, total - rows))


def in_one_step(sequence: Sequence, found: Replay | None) -> Replay | None:
    """Return the replay if its tokens fit a step here, else None: a file may come from a session with longer steps."""
    if found is None or len(found.tokens) > min(sequence.pool.n_ubatch, sequence.table.room(found.start)):
        return None
    return found
