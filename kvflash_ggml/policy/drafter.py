"""The attention of a small model that reads along: the chunks that its newest tokens attend to stay resident.

The small model keeps its KV between scores, so each token goes through it once. If its context is shorter than the
text, it reads the newest part, and chunks before that part keep their last scores. Those are shares of another window's
attention, so only their order compares with the new ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import numpy as np

from ..arrays import Floats, Int32s, common_prefix
from ..constants import CHUNK, round_up
from ..errors import ConfigError, KVFlashError, SnapshotError
from ..state.session import DrafterState, SessionState, TokenAlignment
from ..state.statistics import RowForm
from .base import DRAFTER, Keys, Rows, Scorer, ScoreRequest, register

logger = logging.getLogger("kvflash_ggml")


QUERY_ROWS = 8
"""The newest tokens, whose attention counts. After a cut they are read again, since older queries are not kept."""

MIN_TOKENS = QUERY_ROWS + 1
"""Fewest tokens to compare."""

FAILURES = (KVFlashError, OSError, RuntimeError, ValueError, MemoryError)


class ReadingModel(Protocol):
    """A small model with a memory of its own, in its own tokens. Used by one thread at a time.

    n_ctx: tokens it can hold, a multiple of CHUNK.
    """

    n_ctx: int

    @property
    def length(self) -> int:
        """Tokens it holds."""
        ...

    def push(self, tokens: Int32s) -> None:
        """Read further tokens."""
        ...

    def truncate(self, length: int) -> int:
        """Forget tokens from `length` on. Returns how many are left: fewer if its memory cannot roll back just so
        far.
        """
        ...

    def score_chunks(self) -> Floats:
        """Return the log of each sealed chunk's largest share of the newest tokens' attention; [length // CHUNK]."""
        ...

    def score_tokens(self) -> Floats:
        """Return the log of each token's largest share of attention, in the sealed chunks; [length // CHUNK *
        CHUNK].
        """
        ...

    @property
    def identity(self) -> str:
        """Which model it is, independent of its path."""
        ...

    def state(self) -> SessionState:
        """Return its memory, to be released."""
        ...

    def load(self, saved: DrafterState) -> None:
        """Take over the memory of the same model. SnapshotError, and nothing held, if that fails."""
        ...

    def close(self) -> None: ...


class TargetReader(Protocol):
    """Follows the target's text with a drafter."""

    def read(self, tokens: Int32s) -> tuple[int, Floats] | None:
        """Return the first scored chunk, and scores from there on, NaN for none; None if the text is too short."""
        ...

    def reset(self) -> None:
        """Start again, as if nothing had been read."""
        ...

    def state(self) -> DrafterState:
        """Return its state, to be released."""
        ...

    def load(self, saved: DrafterState, tokens: Int32s) -> None:
        """Continue from there, for a text of these tokens; read again what does not fit."""
        ...

    def close(self) -> None: ...


class Window:
    """Keeps a drafter at the newest end of a text in the drafter's own tokens, and pushes only new tokens to it."""

    def __init__(self, drafter: ReadingModel) -> None:
        self._drafter = drafter
        self._text: Int32s = np.empty(0, np.int32)
        self.base = 0  # position in the text where the drafter's memory begins
        self.pushed = 0  # tokens pushed since the beginning

    @property
    def first(self) -> int:
        """The first position whose score counts: the first token after a cut draws attention by being first."""
        return self.base + CHUNK if self.base else 0

    def follow(self, text: Int32s) -> None:
        """Bring the drafter to the end of `text`."""
        same = common_prefix(self._text, text)
        if same < len(self._text):
            self._cut(same - QUERY_ROWS)
        if len(text) - self.base > self._drafter.n_ctx:
            # half the window stays free, so that a growing text is read at most twice
            self.base = round_up(len(text) - self._drafter.n_ctx // 2, CHUNK)
            self._drafter.truncate(0)
        new = text[self.base + self._drafter.length :]
        if len(new):
            self._drafter.push(new)
            self.pushed += len(new)
        self._text = text.copy()

    def reset(self) -> None:
        self._text, self.base = np.empty(0, np.int32), 0
        self._drafter.truncate(0)

    def state(self, alignment: TokenAlignment | None = None) -> DrafterState:
        """Return the text and the drafter's memory, to be released."""
        return DrafterState(
            source=self._drafter.identity,
            text=self._text,
            base=self.base,
            alignment=alignment,
            session=self._drafter.state(),
        )

    def load(self, saved: DrafterState) -> bool:
        """Continue from there. False, and empty, if the drafter is another one or its memory is lost."""
        self._text, self.base = np.empty(0, np.int32), 0
        try:
            if saved.source != self._drafter.identity:
                raise SnapshotError("another drafter has read it")
            self._drafter.load(saved)
            if saved.base + self._drafter.length > len(saved.text):
                raise SnapshotError("the drafter's memory is longer than its text")
        except SnapshotError as err:
            logger.warning("the drafter reads the text again: %s", err)
            self._drafter.truncate(0)
            return False
        self._text, self.base = saved.text, saved.base
        return True

    def _cut(self, length: int) -> None:
        if length <= self.base:
            self.base = 0
            self._drafter.truncate(0)
        else:
            self._drafter.truncate(length - self.base)


class TokenReader:
    """Follows the text with a drafter of the same tokenizer: chunks map one to one.

    The drafter knows no media: token 0 takes the place of each of their rows.
    """

    def __init__(self, drafter: ReadingModel) -> None:
        self._drafter = drafter
        self.window = Window(drafter)

    def read(self, tokens: Int32s) -> tuple[int, Floats] | None:
        if len(tokens) < MIN_TOKENS:
            return None
        self.window.follow(np.maximum(tokens, 0))
        first = self.window.first // CHUNK
        return first, self._drafter.score_chunks()[first - self.window.base // CHUNK :]

    def reset(self) -> None:
        self.window.reset()

    def state(self) -> DrafterState:
        return self.window.state()

    def load(self, saved: DrafterState, tokens: Int32s) -> None:
        self.window.load(saved)

    def close(self) -> None:
        self._drafter.close()


class DrafterScorer:
    """Scores are logs of the largest share of the drafter's attention in any layer, head and row.

    load: returns the reader when the first score is due. Its error is reported once, and it is called again only after
    the text was reset. source: the drafter's file, for that report. idle: with at most so many tokens nothing can leave
    the pool, so nothing is loaded or read.

    A text that was reset is scored as by a new scorer.
    """

    name = DRAFTER
    query_rows = 0
    overhead = 0.15
    index_bytes = 0

    def __init__(self, load: Callable[[], TargetReader], *, source: str, idle: int = 0) -> None:
        self._load = load
        self._source = source
        self._idle = idle
        self._reader: TargetReader | None = None
        self._reading = False  # whether it reads this text
        self._failed = False
        self._reported: set[str] = set()
        self._scores: Floats = np.empty(0, np.float32)
        self._resume: tuple[DrafterState, Int32s] | None = None  # state for the reader, until it is loaded

    def open(self, keys: Keys, n_chunks: int) -> None:
        self._scores = np.full(n_chunks, np.nan, np.float32)

    def seal(self, chunk: int) -> None: ...

    def truncate(self, n_chunks: int) -> None:
        self._scores[n_chunks:] = np.nan
        if n_chunks == 0:
            self._failed = self._reading = False
            self._resume = None
            if self._reader is not None:
                self._reset(self._reader)

    @property
    def layout(self) -> RowForm:
        return RowForm("drafter float32", 4)

    def dump(self, n_chunks: int) -> Rows:
        return list(self._scores[:n_chunks, None].copy().view(np.uint8))

    def load(self, rows: Rows) -> None:
        for chunk, row in enumerate(rows):
            self._scores[chunk : chunk + 1].view(np.uint8)[:] = row

    def score(self, request: ScoreRequest) -> Floats | None:
        if self._failed or request.n_chunks == 0:
            return None
        if not self._reading and len(request.tokens) <= self._idle:
            return None
        self._reading = True
        try:
            if self._reader is None:
                self._reader = self._load()
                if self._resume is not None:
                    self._reader.load(*self._resume)
                    self._resume = None
            found = self._reader.read(request.tokens)
        except FAILURES as err:
            self._give_up(err)
            return None
        if found is None:
            return None
        first, scores = found
        part = self._scores[first : min(first + len(scores), request.n_chunks)]
        scores = scores[: len(part)]
        np.copyto(part, scores, where=np.isfinite(scores))
        return self._known(request.n_chunks)

    def reader_state(self) -> DrafterState | None:
        return self._reader.state() if self._reader is not None and self._reading else None

    def load_reader(self, saved: DrafterState, tokens: Int32s) -> None:
        self._reading = True
        if self._reader is not None:
            self._reader.load(saved, tokens)
        else:
            self._resume = saved, tokens

    def _known(self, n_chunks: int) -> Floats | None:
        """Return the last score of each chunk; a chunk that never had one gets the average."""
        scores = self._scores[:n_chunks]
        known = np.isfinite(scores)
        if not known.any():
            return None
        return np.where(known, scores, scores[known].mean(dtype=np.float64)).astype(np.float32)

    def _reset(self, reader: TargetReader) -> None:
        try:
            reader.reset()
        except FAILURES as err:
            self._give_up(err)

    def _give_up(self, err: BaseException) -> None:
        self._failed = True
        self.close()
        reason = f"{type(err).__name__}: {err}"
        if reason not in self._reported:
            self._reported.add(reason)
            logger.warning(
                "the drafter %s cannot be used (%s): the chunks used last stay resident until the text is reset",
                self._source,
                reason,
            )

    def close(self) -> None:
        if self._reader is not None:
            reader, self._reader = self._reader, None
            reader.close()


@register(DRAFTER)
def default() -> Scorer:
    raise ConfigError("the policy 'drafter' needs a model file and the target's tokenizer: ask for it through Llama")
