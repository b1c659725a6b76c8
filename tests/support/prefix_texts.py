"""Saved sessions without a model: every byte follows from the text before it, so that a wrong one shows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvflash_ggml.constants import CHUNK
from kvflash_ggml.host.heap import PageHeap
from kvflash_ggml.pool.page_table import PageTableState
from kvflash_ggml.pool.plan import ABSENT
from kvflash_ggml.state.blob import Bytes
from kvflash_ggml.state.session import PolicyState, SessionLimits, SessionState
from kvflash_ggml.state.statistics import Statistics
from kvflash_ggml.store.disk import DiskTier
from support.fake_engine import FakeHost

ROW = 8
PAGE = CHUNK * ROW
N_VOCAB = 1000
ROW_BYTES = 4
STATE = 100

Int32s = npt.NDArray[np.int32]


def text(*parts: tuple[int, int]) -> Int32s:
    """A text of (seed, length) parts: the same part is the same tokens."""
    tokens = [np.random.default_rng(seed).integers(0, N_VOCAB, length) for seed, length in parts]
    return np.concatenate(tokens or [np.empty(0)]).astype(np.int32)


def derived(tokens: Int32s, size: int, salt: bytes = b"") -> bytes:
    """Bytes that no other text has."""
    return hashlib.shake_128(salt + tokens.tobytes()).digest(size)


def image_of(tokens: Int32s, chunk: int) -> bytes:
    """What the cache holds of a chunk: each row depends on the text up to it, and rows to come are zero."""
    before, inside = derived(tokens[: chunk * CHUNK], 16), tokens[chunk * CHUNK : (chunk + 1) * CHUNK]
    rows = b"".join(derived(inside[: i + 1], ROW, before) for i in range(len(inside)))
    return rows + bytes(PAGE - len(rows))


def blank(image: memoryview, first: int) -> None:
    image[first * ROW :] = bytes((CHUNK - first) * ROW)


def statistics_of(tokens: Int32s, after: SessionState | None = None) -> Statistics:
    """after: a text whose rows of whole chunks are shared."""
    rows = [] if after is None else list(after.rows[: after.length // CHUNK])
    for c in range(len(rows), len(tokens) // CHUNK):
        rows.append(np.frombuffer(derived(tokens[: (c + 1) * CHUNK], ROW_BYTES, b"row"), np.uint8))
    return Statistics("made up", rows)


def ready(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def policy() -> PolicyState:
    return PolicyState(name="qk", since_score=0, since_reselect=0, due=0, pending=[], statistics=ready(None))


def make_heap(limit: int | None = None, *, page_bytes: int = PAGE) -> PageHeap:
    return PageHeap(FakeHost(), page_bytes, limit=limit, spill=None)


def session(
    heap: PageHeap,
    tokens: Int32s,
    *,
    stateful: bool = False,
    checkpoints: Sequence[int] = (),
    logits: bool = True,
    after: SessionState | None = None,
) -> SessionState:
    """A session that has read the text. after: one whose full chunks are the beginning of it, and are shared."""
    chunks = -(-len(tokens) // CHUNK)
    pages = [] if after is None else [heap.retain(page) for page in after.pages[: after.length // CHUNK]]
    for c in range(len(pages), chunks):
        (page,) = heap.new(1)
        heap.view(page)[:PAGE] = image_of(tokens, c)
        pages.append(page)
    saved_policy = policy()
    saved_policy.statistics = ready(statistics_of(tokens, after))
    return SessionState(
        tokens=tokens,
        whole=tokens % 2 == 0,
        table=PageTableState(
            blocks=[c if c < 4 else ABSENT for c in range(chunks)],
            last_use=list(range(chunks)),
            clock=chunks,
            settled=True,
            pins=frozenset(),
            scores=None,
        ),
        heap=heap,
        pages=pages,
        state=Bytes(derived(tokens, STATE, b"state") if stateful else b""),
        checkpoints={pos: Bytes(derived(tokens[:pos], STATE, b"state")) for pos in checkpoints},
        queries=np.arange(6, dtype=np.float32),
        queries_valid_from=len(tokens),
        policy=saved_policy,
        logits=np.frombuffer(derived(tokens, 4 * N_VOCAB), np.uint8).astype(np.float32)[:N_VOCAB] if logits else None,
    )


def check_session(saved: SessionState, tokens: Int32s, *, stateful: bool) -> None:
    """It is of this text and of no other, to the last byte."""
    assert saved.tokens.tolist() == tokens.tolist()
    assert saved.whole.tolist() == (tokens % 2 == 0).tolist()
    assert len(saved.pages) == len(saved.table.blocks) == -(-len(tokens) // CHUNK)
    for c, page in enumerate(saved.pages):
        assert saved.heap.bytes_of(page) == image_of(tokens, c), f"chunk {c} is of another text"
    if stateful:
        assert saved.state.read() == derived(tokens, STATE, b"state")
    assert saved.policy is not None
    assert saved.policy.statistics.done()
    assert not saved.rows or [r.tolist() for r in saved.rows] == [r.tolist() for r in statistics_of(tokens).rows]


def make_tier(
    folder: Path, heap: PageHeap, *, capacity: int = 1 << 30, model: str = "a", stateful: bool = False
) -> DiskTier:
    return DiskTier(
        folder,
        capacity=capacity,
        fingerprint={"model": model},
        settings={"pool": 512},
        heap=heap,
        blank=blank,
        stateful=stateful,
        limits=SessionLimits(n_ctx=1 << 20, n_vocab=N_VOCAB, queries=6),
    )


@contextmanager
def released(saved: SessionState) -> Iterator[SessionState]:
    try:
        yield saved
    finally:
        saved.release()


def put(tier: DiskTier, heap: PageHeap, tokens: Int32s, **kwargs: Any) -> None:
    with released(session(heap, tokens, **kwargs)) as saved:
        tier.put(saved)


def load(tier: DiskTier, tokens: Int32s, *, stateful: bool = False) -> int:
    """How much of a text is found, every byte of it checked."""
    found = tier.find(tokens)
    if found.length:
        with released(tier.load(found, tokens, policy())) as saved:
            check_session(saved, tokens[: found.length], stateful=stateful)
    return found.length
