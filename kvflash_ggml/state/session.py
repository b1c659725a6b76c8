"""A swapped-out session: everything that it needs to go on bit for bit, and nothing that is on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import SnapshotError
from ..threads import done

if TYPE_CHECKING:
    from ..arrays import Floats, Int32s, Int64s
    from ..host.heap import PageHeap
    from ..host.image import PageImage
    from ..pool.page_table import PageTableState
    from .blob import Blob
    from .statistics import Replay, Row, Statistics


@dataclass(frozen=True, slots=True)
class Origin:
    """Identifies a drafter: another one cannot use its memory.

    name: its kind. model: a hash of its file. window: maximum tokens of its context. types: ggml's, of its K and V.
    """

    name: str
    model: str
    window: int
    types: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedDraft:
    """The memory of a drafter.

    length: tokens of the text that it was given. context: positions `first` to before `end`, as llama.cpp writes them.
    rows: f32, what the target computed for the newest tokens; empty if the drafter needs none.
    """

    origin: Origin
    length: int
    first: int
    end: int
    context: Blob = field(repr=False)
    rows: Blob = field(repr=False)

    @property
    def size(self) -> int:
        """Bytes, in memory or in a file."""
        return self.context.size + self.rows.size


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Bounds of a saved session, for a model and a context. queries: floats of the captured ring."""

    n_ctx: int
    n_vocab: int
    queries: int


@dataclass(slots=True, kw_only=True, eq=False)
class TokenAlignment:
    """Byte positions in the text at which tokens end, of the target and of the drafter.

    The drafter's first `settled` tokens are final.
    """

    ends: Int64s
    drafted_ends: Int64s
    settled: int


@dataclass(slots=True, kw_only=True, eq=False)
class DrafterState:
    """The drafter of a policy: its text in its own tokens, and its memory from token `base` on.

    source: identifies its model. alignment: None with the target's tokenizer. session: the memory, or a function that
    reads it from a file.
    """

    source: str
    text: Int32s
    base: int
    alignment: TokenAlignment | None
    session: SessionState | Callable[[PageHeap, SessionLimits], SessionState]

    def open(self, heap: PageHeap, limits: SessionLimits) -> SessionState:
        """Return the session, for the caller to release. SnapshotError if its file cannot be read."""
        return self.session.share() if isinstance(self.session, SessionState) else self.session(heap, limits)

    def release(self) -> None:
        """Release the page images."""
        if isinstance(self.session, SessionState):
            self.session.release()


@dataclass(slots=True, kw_only=True, eq=False)
class PolicyState:
    """A policy and what it counts, between two scoring passes.

    pending: scores that were requested and not used yet, oldest first. statistics: of the sealed chunks; None if the
    policy does not share them. reader: its drafter, if it has one. found: of the ends of prompts, newest last.
    """

    name: str
    since_score: int
    since_reselect: int
    due: int
    pending: list[Floats | None]
    statistics: Future[Statistics | None]
    reader: DrafterState | None = None
    found: Sequence[Replay] = ()

    def before(self, length: int) -> PolicyState:
        """Return the state for the text cut to `length` tokens, without statistics."""
        found = [one for one in self.found if one.start <= length]
        blank = replace(self, since_score=0, since_reselect=0, due=0, pending=[], reader=None, found=found)
        return replace(blank, statistics=done(None))


@dataclass(slots=True, kw_only=True, eq=False)
class SessionState:
    """A text and everything that was computed for it.

    whole: for each token, whether it has seen the whole text before it. pages: an image per chunk, retained until
    `release`. state, checkpoints: what is not pooled, at the end and by position. queries: the captured ring, flat,
    valid for positions from `queries_valid_from` on. logits: of the last token, if it was just evaluated. rebuild:
    whether the next step brings the resident set to the scores of the table. seed: of the next random numbers.
    """

    tokens: Int32s
    whole: npt.NDArray[np.bool_]
    table: PageTableState
    heap: PageHeap
    pages: list[PageImage]
    state: Blob
    checkpoints: dict[int, Blob]
    queries: Floats
    queries_valid_from: int
    policy: PolicyState | None
    logits: Floats | None = None
    rebuild: bool = False
    seed: int = 0
    drafts: Sequence[SavedDraft] = ()
    _released: bool = field(default=False, init=False)

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def size(self) -> int:
        """Bytes of everything, in memory or in files."""
        shared = sum(blob.size for blob in self.blobs) + sum(row.nbytes for row in self.rows)
        return len(self.pages) * self.heap.page_bytes + shared + self.own_size

    @property
    def blobs(self) -> list[Blob]:
        """Copies of state. Later texts may share them."""
        return [self.state, *self.checkpoints.values()]

    @property
    def rows(self) -> Sequence[Row]:
        """The policy's statistics, if they have been computed."""
        if self.policy is None or not self.policy.statistics.done():
            return ()
        statistics = self.policy.statistics.result()
        return () if statistics is None else statistics.rows

    @property
    def own_size(self) -> int:
        """Bytes that no other text shares: all but page images, copies of state and statistics."""
        pending, found = ((), ()) if self.policy is None else (self.policy.pending, self.policy.found)
        arrays = [self.tokens, self.queries, self.logits, *pending]
        kept: int = sum(array.nbytes for array in arrays if array is not None)
        return kept + sum(one.size for one in self.drafts) + sum(one.size for one in found)

    def parts(self) -> Iterator[tuple[int, int]]:
        """Yield (identity, bytes) of each part beside the tokens. Texts may share all parts but the first."""
        yield id(self), self.own_size - self.tokens.nbytes
        for page in self.pages:
            yield id(page), self.heap.page_bytes
        for blob in self.blobs:
            yield id(blob), blob.size
        for row in self.rows:
            yield id(row), row.nbytes

    def share(self) -> SessionState:
        """Return the session for another holder, to be released too. A policy's drafter is not part of it."""
        if self._released:
            raise SnapshotError("this session has been released")
        for page in self.pages:
            self.heap.retain(page)
        return replace(self, policy=self.policy and replace(self.policy, reader=None))

    def release(self) -> None:
        """Release the page images."""
        if not self._released:
            self._released = True
            for page in self.pages:
                self.heap.release(page)
            if self.policy is not None and self.policy.reader is not None:
                self.policy.reader.release()
