"""A session that has been put aside: everything it needs to go on bit for bit, and nothing that is on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, TypeGuard, TypeVar

import numpy as np
import numpy.typing as npt

from ..arrays import Buffer, Floats, Int32s, Int64s
from ..errors import SnapshotError
from ..host.heap import PageHeap
from ..host.image import PageImage
from ..pool.page_table import PageTableState


class Blob(Protocol):
    """Some bytes, in memory or in a file."""

    @property
    def size(self) -> int: ...

    def read(self) -> Buffer:
        """SnapshotError if they are in a file and damaged."""
        ...


@dataclass(frozen=True)
class Bytes:
    """A blob in memory."""

    data: Buffer

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self) -> Buffer:
        return self.data


@dataclass(frozen=True, eq=False)
class Copied:
    """A blob on its way to memory: `data` is whole when all its pieces are copied."""

    data: Buffer
    pieces: Sequence[Future[None]]

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self) -> Buffer:
        for piece in self.pieces:
            piece.result()
        return self.data


def is_in_memory(blob: Blob | None) -> TypeGuard[Blob]:
    """Or on its way there, and not in a file?"""
    return isinstance(blob, Bytes | Copied)


def in_memory(blob: Blob) -> Blob:
    """The blob itself if it is there, else what is read. SnapshotError if that is damaged."""
    return blob if is_in_memory(blob) else Bytes(blob.read())


@dataclass(frozen=True, slots=True)
class Origin:
    """Which drafter it was. Only one of the same origin can go on from what it knew.

    name: its kind. model: a hash of its file. window: tokens that it sees at most. types: ggml's, of its K and V.
    """

    name: str
    model: str
    window: int
    types: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedDraft:
    """length: tokens of the text that it was told of. first, end: the positions that its context holds, from `first` to
    before `end`. context: them, as llama.cpp writes them. rows: f32, what the target computed for the newest tokens, as
    the drafter wants it; empty if it keeps none.
    """

    origin: Origin
    length: int
    first: int
    end: int
    context: Blob = field(repr=False)
    rows: Blob = field(repr=False)

    @property
    def size(self) -> int:
        """Bytes, wherever they are."""
        return self.context.size + self.rows.size


Row = npt.NDArray[np.uint8]


T = TypeVar("T")


def done(value: T) -> Future[T]:
    """A future whose result is known."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a saved session can be at most, for a model and a context: nothing larger is read from a file.

    queries: floats of the captured ring.
    """

    n_ctx: int
    n_vocab: int
    queries: int


@dataclass(slots=True, kw_only=True, eq=False)
class TokenAlignment:
    """Where the target's tokens and the drafter's end in the text's bytes; the drafter's first `settled` are final."""

    ends: Int64s
    drafted_ends: Int64s
    settled: int


@dataclass(slots=True, kw_only=True, eq=False)
class DrafterState:
    """A drafter that reads along: its text in its own tokens, and its memory from token `base` on.

    source: which model it is. bridge: None where it has the target's tokenizer. session: that memory, or a function
    that opens it for the heap of such a model.
    """

    source: str
    text: Int32s
    base: int
    bridge: TokenAlignment | None
    session: SessionState | Callable[[PageHeap, Limits], SessionState]

    def open(self, heap: PageHeap, limits: Limits) -> SessionState:
        """The session, to be released. SnapshotError if it is not to be had any more."""
        return self.session.share() if isinstance(self.session, SessionState) else self.session(heap, limits)

    def release(self) -> None:
        """Let go of the page images."""
        if isinstance(self.session, SessionState):
            self.session.release()


class Layout(NamedTuple):
    """What a row of a policy's statistics means, and its bytes. Rows of another layout are made anew from the keys."""

    name: str
    row_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """What a policy keeps of each sealed chunk, a row of bytes each. Nobody writes to them: texts share their rows."""

    name: str
    rows: Sequence[Row]

    @property
    def layout(self) -> Layout:
        return Layout(self.name, len(self.rows[0]) if self.rows else 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """What the end of a prompt has found. Its last step has read `tokens` from `start` on.

    table: before that step, with the scores that it went by. rebuild: did it bring the resident set to these?
    ranking, due: the same of the answer's first step.
    """

    start: int
    tokens: Int32s
    table: PageTableState
    rebuild: bool
    ranking: Floats | None
    due: bool

    @property
    def size(self) -> int:
        """Bytes of it in memory, about."""
        arrays = self.tokens, self.table.scores, self.ranking
        return 16 * len(self.table.blocks) + sum(array.nbytes for array in arrays if array is not None)


@dataclass(slots=True, kw_only=True, eq=False)
class PolicyState:
    """A policy and its clock, between two looks.

    looks: scores that have been asked for and not used yet, the oldest first. statistics: of the sealed chunks, as soon
    as they are at hand; None if the policy keeps them to itself. reader: the model of its own, if the policy has one.
    found: by the ends of prompts, the newest last.
    """

    name: str
    tau: int
    since_look: int
    since_reselect: int
    due: int
    looks: list[Floats | None]
    statistics: Future[Statistics | None]
    reader: DrafterState | None = None
    found: Sequence[Replay] = ()

    def before(self, length: int) -> PolicyState:
        """What it still is for a text that is cut to `length` tokens, without statistics."""
        found = [one for one in self.found if one.start <= length]
        blank = replace(self, since_look=0, since_reselect=0, due=0, looks=[], reader=None, found=found)
        return replace(blank, statistics=done(None))


@dataclass(slots=True, kw_only=True, eq=False)
class SessionState:
    """tokens: all that were read. whole: of each, has it seen the whole text before it? pages: an image per chunk,
    retained until `release`. state, checkpoints: what is not pooled, now and by position. queries: the captured ring,
    flat, true for positions from `queries_valid_from` on. logits: of the last token, if it was just evaluated. rebuild:
    does the next step bring the resident set to the scores of the table? seed: of the next random numbers. drafts: what
    drafters know of the text.
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
        """Bytes of everything, wherever they are."""
        shared = sum(blob.size for blob in self.blobs) + sum(row.nbytes for row in self.rows)
        return len(self.pages) * self.heap.page_bytes + shared + self.own_size

    @property
    def blobs(self) -> list[Blob]:
        """Copies of state, which later texts may have too."""
        return [self.state, *self.checkpoints.values()]

    @property
    def rows(self) -> Sequence[Row]:
        """The policy's statistics, if they are at hand."""
        if self.policy is None or not self.policy.statistics.done():
            return ()
        statistics = self.policy.statistics.result()
        return () if statistics is None else statistics.rows

    @property
    def own_size(self) -> int:
        """Bytes that no other text has: all but page images, copies of state and statistics."""
        looks, found = ((), ()) if self.policy is None else (self.policy.looks, self.policy.found)
        arrays = [self.tokens, self.queries, self.logits, *looks]
        kept: int = sum(array.nbytes for array in arrays if array is not None)
        return kept + sum(one.size for one in self.drafts) + sum(one.size for one in found)

    def parts(self) -> Iterator[tuple[int, int]]:
        """What it has in memory beside its tokens, as (identity, bytes). Texts may share all parts but the first."""
        yield id(self), self.own_size - self.tokens.nbytes
        for page in self.pages:
            yield id(page), self.heap.page_bytes
        for blob in self.blobs:
            yield id(blob), blob.size
        for row in self.rows:
            yield id(row), row.nbytes

    def share(self) -> SessionState:
        """The same for another holder, who releases it too. Without the part of a policy's drafter."""
        if self._released:
            raise SnapshotError("this session has been released")
        for page in self.pages:
            self.heap.retain(page)
        return replace(self, policy=self.policy and replace(self.policy, reader=None))

    def release(self) -> None:
        """Let go of the page images."""
        if not self._released:
            self._released = True
            for page in self.pages:
                self.heap.release(page)
            if self.policy is not None and self.policy.reader is not None:
                self.policy.reader.release()
