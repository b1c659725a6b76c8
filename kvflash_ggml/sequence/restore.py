"""Saves a session, and restores it so that it continues bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from ..constants import CHUNK
from ..errors import ContextFull, NotFinite, SnapshotError
from ..media.rows import advances_of
from ..pool.plan import ABSENT
from ..state.blob import Blob, Bytes, in_memory
from ..state.session import SessionState

if TYPE_CHECKING:
    from ..host.image import PageImage
    from .sequence import Sequence


def state(text: Sequence, length: int | None = None, *, drafts: bool = True) -> SessionState:
    """Return the session, or its first `length` tokens, to be loaded later. The session goes on unchanged.

    drafts: with the state of drafters, if the session is whole.

    Waits for the compute, and copies the pages that the host does not have yet. SnapshotError for a length whose
    recurrent state or sliding window is not known, HostMemoryError if there is no room for the copies, DeviceLost if a
    server was lost before everything was read, NotFinite for a text whose values are not finite.
    """
    with text.recovery.told():
        return _state(text, length, drafts=drafts)


def _state(text: Sequence, length: int | None, *, drafts: bool) -> SessionState:
    text.settle()
    if text.is_finite() is False:
        raise NotFinite(
            f"a text of {text.length} tokens is not kept: its values are not finite. Reset, and read it again"
        )
    whole = length is None or length == text.length
    length = text.length if length is None else length
    if not 0 <= length <= text.length:
        raise SnapshotError(f"cannot save {length} tokens of a text of {text.length}")
    unpooled = _state_at(text, length)
    if text.bounded:
        text.paging.save()
    saved = _first_tokens(text, length, unpooled, text.paging.retain(length))
    try:
        saved.queries = text.queries.read(length)
        saved.queries_valid_from = text.queries.saved_from(length, text.length)
        if whole:
            saved.table.scores, saved.table.settled = text.relevance.ranking, text.table.layout.settled
            saved.policy = text.relevance.state(length)
            saved.rebuild = text.relevance.rebuild
            if drafts and text.follower is not None:
                saved.drafts = text.follower.state()
        if not all(text.engine.is_sound(page.filled) for page in saved.pages):
            text.recovery.check()  # a page was not read before its device was lost
    except BaseException:
        saved.release()
        raise
    return saved


def kept_state(text: Sequence) -> SessionState:
    """Return the first `text.recovery.kept` tokens, from the data on this machine. It asks no device.

    SnapshotError if that is nothing, HostMemoryError if there is no room for the copy of a page.
    """
    length = text.recovery.kept
    if length == 0:
        raise SnapshotError("nothing of the text is on this machine: no chunk was sealed and copied in time")
    unpooled = text.checkpoints.state().get(length, Bytes(b""))
    return _first_tokens(text, length, unpooled, text.paging.retain_kept(length))


def _first_tokens(text: Sequence, length: int, state: Blob, pages: list[PageImage]) -> SessionState:
    """Return the first `length` tokens as a session, as if no query or score had been kept. It owns the pages."""
    table, chunks = text.table.state(None), -(-length // CHUNK)
    table.blocks, table.last_use, table.settled = table.blocks[:chunks], table.last_use[:chunks], False
    return SessionState(
        tokens=text.ids[:length].copy(),
        whole=text.whole[:length].copy(),
        table=table,
        heap=text.paging.heap,
        pages=pages,
        state=state,
        checkpoints={pos: blob for pos, blob in text.checkpoints.state().items() if pos <= length},
        queries=np.zeros(text.queries.size, np.float32),
        queries_valid_from=length,
        policy=text.relevance.state(text.length, cut=length),
    )


def load(text: Sequence, saved: SessionState, then: Callable[[SessionState], None] | None = None) -> None:
    """Replace the text by a saved session of this heap. It continues bit for bit where its table fits.

    then: called with the session at the end, by whatever has to follow it: both happen, or neither.

    ContextFull, ConfigError (pins that this pool cannot hold), SnapshotError, and HostMemoryError while pages are read:
    nothing has changed. Any later interrupt leaves an empty session.
    """
    text.settle()
    if text.spoiled:  # there is no state to go back to
        text.reset()
    if saved.length > text.n_ctx:
        raise ContextFull(f"the saved text has {saved.length} tokens, the context window {text.n_ctx}")
    end = int(advances_of(saved.tokens[:-1]).sum()) + bool(saved.length)
    if end > saved.length:
        raise SnapshotError(f"a text of {saved.length} rows ends at position {end}: the rows of an image have fewer")
    state = _read(text, saved)
    try:
        _put_state(text, state, end)
        text.unfinished.work = text.clear
        text.clear(text.paging.empty)
        text.ids[: saved.length] = saved.tokens
        text.pool.place(text.seq, saved.tokens, text.n_ctx)
        text.whole[: saved.length] = saved.whole
        text.table.load(saved.length, saved.table)
        text.paging.load(saved.pages, text.length)
        text.checkpoints.load(saved.checkpoints, text.length, state)
        text.queries.load(saved.queries, saved.queries_valid_from, text.length)
        text.relevance.load(saved.policy, text.tokens, saved.table.scores, rebuild=saved.rebuild)
        if text.follower is not None:
            text.follower.load(saved.drafts, text.tokens)
        text.events.truncated(text.length, text.table.resident_chunks)
        if then is not None:
            then(saved)
        text.unfinished.work = None
    except BaseException:
        text.settle()
        raise


def _read(text: Sequence, saved: SessionState) -> Blob:
    """Read everything that can be damaged or refused, while nothing has changed. Returns the state in memory."""
    places = text.table.place(saved.length, saved.table)
    if saved.state.size and not (text.engine.info.recurrent or text.engine.info.n_swa):
        raise SnapshotError("the text has recurrent state or a sliding window, which this model does not know")
    with ThreadPoolExecutor(1, thread_name_prefix="kvflash-state") as reader:
        reading = reader.submit(in_memory, saved.state)
        saved.heap.load([page for page, block in zip(saved.pages, places, strict=True) if block != ABSENT])
        state = reading.result()
    if saved.policy is not None:
        saved.policy.statistics.result()
    return state


def _put_state(text: Sequence, state: Blob, end: int) -> None:
    """Put the state in place; settling undoes it. SnapshotError if the engine refuses it. end: position behind its
    text.
    """
    if text.length:
        before, end_before = text.checkpoints.at(text.length), text.engine.end(text.length, seq=text.seq)
        text.unfinished.work = lambda: text.checkpoints.copies.put(before, end_before)
    else:  # there is no state to go back to
        text.unfinished.work = text.clear
    text.checkpoints.copies.put(state, end)


def _state_at(text: Sequence, length: int) -> Blob:
    """Return recurrent state and windows as they were after `length` tokens."""
    if length == text.length or not (text.engine.info.recurrent or text.engine.info.n_swa):
        return text.checkpoints.at(text.length)
    states = text.checkpoints.state()
    if length not in states:
        positions = ", ".join(map(str, [*sorted(states), text.length]))
        raise SnapshotError(
            f"the recurrent state or sliding window after {length} tokens is not known: it is after {positions}"
        )
    return states[length]
