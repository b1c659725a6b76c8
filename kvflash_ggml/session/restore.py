"""Puts a session aside, and puts it back so that it goes on bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..arrays import Floats
from ..constants import CHUNK
from ..errors import ContextFull, SnapshotError
from ..pool.plan import ABSENT
from ..state.blob import Blob, Bytes
from ..state.session import SavedSession

if TYPE_CHECKING:
    from .session import Session


def freeze(session: Session, length: int | None = None) -> SavedSession:
    """The session as it is, or cut to its first `length` tokens, to be restored later. It goes on unchanged.

    Waits for the compute, and copies what the host does not have yet. SnapshotError for a length at which recurrent
    state or a sliding window is not known, HostMemoryError if there is no room for the copies.
    """
    session.settle()
    whole = length is None or length == session.length
    length = session.length if length is None else length
    if not 0 <= length <= session.length:
        raise SnapshotError(f"cannot save {length} tokens of a text of {session.length}")
    state = _state_at(session, length)
    if session.bounded:
        session.paging.save()
    table = session.pager.freeze()
    chunks = -(-length // CHUNK)
    table.blocks, table.last_use = table.blocks[:chunks], table.last_use[:chunks]
    if not whole:
        table.scores, table.settled = None, False
    saved = SavedSession(
        tokens=session.ids[:length].copy(),
        table=table,
        heap=session.paging.heap,
        pages=session.paging.retain(length),
        state=state,
        checkpoints={pos: blob for pos, blob in session.checkpoints.freeze().items() if pos <= length},
        queries=_read_queries(session),
        queries_from=session.known_from(length),
        policy=None,
    )
    try:
        if whole and session.reselector is not None:
            saved.policy = session.reselector.freeze(length // CHUNK)
    except BaseException:
        saved.release()
        raise
    return saved


def restore(session: Session, saved: SavedSession, then: Callable[[SavedSession], None] | None = None) -> None:
    """Replace everything by a frozen session of this heap, which goes on bit for bit where its table fits.

    then: called with it in the end, for whoever has to follow: both are done, or neither.

    ContextFull, ConfigError (pins that this pool cannot hold), SnapshotError, and HostMemoryError while pages are read:
    nothing has changed. Whatever interrupts it after that leaves an empty session.
    """
    session.settle()
    if saved.length > session.n_ctx:
        raise ContextFull(f"the saved text has {saved.length} tokens, the context window {session.n_ctx}")
    state = _read(session, saved)
    try:
        _try_state(session, state, saved.length)
        session.unfinished.begin(session.clear)
        session.clear()
        session.ids[: saved.length] = saved.tokens
        session.pager.adopt(saved.length, saved.table, images=session.paging.keep_images)
        session.paging.adopt(saved.pages, session.length)
        session.engine.set_state(state, session.length)
        session.checkpoints.adopt(saved.checkpoints)
        session.queries_from = session.length
        if saved.queries.size and saved.queries.size == query_size(session):
            session.engine.write_queries(saved.queries)
            session.queries_from = saved.queries_from
        if session.reselector is not None:
            session.reselector.adopt(saved.policy, session.tokens)
        session.watch.cut(session.length, session.pager.resident_chunks)
        if then is not None:
            then(saved)
        session.unfinished.end()
    except BaseException:
        session.settle()
        raise


def _read(session: Session, saved: SavedSession) -> bytes | bytearray:
    """Read all that can be damaged or refused, while there is a way back. Returns what is not pooled."""
    places = session.pager.place(saved.length, saved.table)
    if saved.state.size and not (session.engine.info.recurrent or session.engine.info.n_swa):
        raise SnapshotError("the text has recurrent state or a sliding window, which this model does not know")
    with ThreadPoolExecutor(1, thread_name_prefix="kvflash-state") as reader:
        reading = reader.submit(saved.state.read)
        saved.heap.load([page for page, block in zip(saved.pages, places, strict=True) if block != ABSENT])
        state = reading.result()
    if saved.policy is not None:
        saved.policy.statistics.result()
    return state


def _try_state(session: Session, state: bytes | bytearray, length: int) -> None:
    """SnapshotError if the engine refuses it. To be settled: then it is as it was."""
    if session.length:  # else there is nothing to come back to
        session.unfinished.begin(partial(session.engine.set_state, session.engine.get_state(), session.length))
        session.engine.set_state(state, length)


def _state_at(session: Session, length: int) -> Blob:
    """What is not pooled, as it was after `length` tokens."""
    if length == session.length or not (session.engine.info.recurrent or session.engine.info.n_swa):
        return Bytes(session.engine.get_state())
    states = session.checkpoints.freeze()
    if length not in states:
        known = ", ".join(map(str, [*sorted(states), session.length]))
        raise SnapshotError(
            f"the recurrent state or sliding window after {length} tokens is not known: it is after {known}"
        )
    return states[length]


def query_size(session: Session) -> int:
    """Floats in the captured ring."""
    return sum(math.prod(shape) for shape in session.engine.query_shapes)


def _read_queries(session: Session) -> Floats:
    """The captured ring, flat; empty if none is kept."""
    queries = np.zeros(query_size(session), np.float32)
    if queries.size:
        session.engine.wait(session.engine.read_queries(queries))
    return queries
