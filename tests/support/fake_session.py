"""A session on the fake engine, and everything that must be true of it between two calls."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import io
import os
import tempfile
from collections import abc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from kvflash_ggml.config import KVFlashConfig
from kvflash_ggml.constants import CHUNK
from kvflash_ggml.host import slabs, spill
from kvflash_ggml.host.image import NOWHERE
from kvflash_ggml.pool.masks import FREE
from kvflash_ggml.pool.plan import ABSENT
from kvflash_ggml.sequence.sequence import Sequence
from kvflash_ggml.state.session import SessionState
from support.fake_engine import PAGE_BYTES, FakeEngine, make_session
from support.saving import settle_scores

from .integrity import check_table


class FaultyFile(io.FileIO):
    """A spill file on a disk that can be full, break, or lose its end."""

    trouble: str | None = None

    def write(self, data: Any) -> int:
        if FaultyFile.trouble == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        if FaultyFile.trouble == "half" and len(data) > 1:
            FaultyFile.trouble = "full"
            return super().write(memoryview(data)[: len(data) // 2])
        return super().write(data)

    def readinto(self, data: Any) -> int:
        if FaultyFile.trouble == "short":
            return super().readinto(memoryview(data)[: len(data) // 2]) and 0
        if FaultyFile.trouble == "broken":
            raise OSError(errno.EIO, "Input/output error")
        return super().readinto(data)


@contextlib.contextmanager
def small_slabs(pages: int = 3) -> Iterator[None]:
    """Slabs of a few pages, and spill files that can fail."""

    def spill_file(*_: Any, dir: Any = None, **__: Any) -> FaultyFile:
        fd, name = tempfile.mkstemp(dir=dir)
        Path(name).unlink()
        return FaultyFile(fd, "r+b")

    with (
        mock.patch.object(slabs, "SLAB_BYTES", pages * PAGE_BYTES),
        mock.patch.object(spill.tempfile, "TemporaryFile", spill_file),
    ):
        FaultyFile.trouble = None
        yield
        FaultyFile.trouble = None


def stored(session: Sequence, image: Any, chunk: int) -> bytes:
    page, heap = session.store.page(chunk), session.store.heap
    if page.address:
        return image(page.address)
    if page.place == NOWHERE:
        data = bytearray(PAGE_BYTES)
        page.source.read_into(memoryview(data))
        return bytes(data)
    assert heap._spill is not None
    return os.pread(heap._spill._file.fileno(), PAGE_BYTES, page.place * PAGE_BYTES)


def settle_ahead(session: Sequence) -> None:
    """Let the slab that is being made ahead arrive, so that a refusal hits a known call."""
    if session.store.heap._slabs._next is not None:
        concurrent.futures.wait([session.store.heap._slabs._next])


def accept(session: Sequence, count: int) -> None:
    """The first `count` of the tokens that were verified are of the text."""
    for row in range(count):
        session.keep(row)
    session.settle()


def reach(one: Sequence) -> None:
    """Take the lock of its page images, for as long as nothing takes."""
    with one.paging.heap.lease(()):
        pass


def check(session: Sequence, tokens: list[int], frozen: abc.Sequence[SessionState] = ()) -> None:
    """Everything that must be true between two calls. frozen: what is put aside."""
    engine, pager = session.engine, session.table
    assert isinstance(engine, FakeEngine)
    settle_scores(session)
    check_table(pager)
    assert session.length == pager.length == len(tokens) == len(engine.truth)
    assert session.tokens.tolist() == tokens == engine.tokens
    assert len(pager.chunks) == -(-len(tokens) // CHUNK)

    pool, image = engine.settled()
    cells = np.full(engine.info.n_slots, -1, np.int32)
    places = np.full(engine.info.n_slots, FREE, np.int32)
    for c, chunk in enumerate(pager.chunks):
        lo, hi = c * CHUNK, min((c + 1) * CHUNK, len(tokens))
        rows = b"".join(engine.truth[lo:hi])
        if chunk.block != ABSENT:
            base = chunk.block * CHUNK
            assert pool[base : base + hi - lo].tobytes() == rows, f"block of chunk {c}"
            assert engine.cell_token[base : base + hi - lo].tolist() == tokens[lo:hi]
            cells[base : base + hi - lo] = np.arange(lo, hi)
            places[base : base + CHUNK] = np.arange(lo, lo + CHUNK)
        if c in session.store:
            assert stored(session, image, c)[: len(rows)] == rows, f"image of chunk {c}"
        elif session.bounded and hi - lo == CHUNK:
            assert c in pager.unsaved, f"chunk {c} can never leave"
    np.testing.assert_array_equal(engine.cell_pos, cells)
    np.testing.assert_array_equal(session.mask.slot_pos, places)

    store, heap = session.store, session.store.heap
    assert set(store) <= set(range(len(pager.chunks)))
    held = [*map(store.page, store), *(page for saved in frozen for page in saved.pages)]
    live = set(held)
    assert all(page.holders == held.count(page) for page in live)
    assert set(heap._pages) == {page for page in live if page.address}
    assert len(heap._pages) + len(heap._slabs._free) == slab_pages(session)
    places = [page.place for page in live if page.place != NOWHERE]
    if heap._spill is not None:
        assert sorted([*places, *heap._spill._free]) == list(range(heap._spill._places))
    if heap.limit is not None:
        assert heap.host_bytes <= heap.limit


def slab_pages(session: Sequence) -> int:
    heap, engine = session.store.heap, session.engine
    settle_ahead(session)
    ahead = heap._slabs._next
    unused = {ahead.result()} if ahead is not None and not ahead.exception() else set()
    size = sum(len(slab) for base, slab in engine.slabs.items() if base in heap._slabs._slabs)
    assert {base for base in engine.slabs if base not in heap._slabs._slabs} == unused | query_buffers(session)
    return size // PAGE_BYTES


def query_buffers(session: Sequence) -> set[int]:
    return set() if session.scoring is None else set(session.scoring._addresses)


def check_protected(session: Sequence) -> None:
    """After a step: sinks, pins, tail and head are on the device."""
    head = (session.length - 1) // CHUNK
    for c in session.table.protected(head, head):
        assert session.table.chunks[c].block != ABSENT, f"chunk {c} is protected"


def make(
    n_slots: int = 512,
    *,
    n_ctx: int = 2048,
    n_batch: int = 128,
    n_ubatch: int = 64,
    order: list[int] | None = None,
    timing: Any = "lazy",
    config: dict[str, Any] | None = None,
    scorer: Any = None,
    stage: int = 0,
    **info: Any,
) -> Sequence:
    rows = {} if scorer is None else {"query_rows": scorer.query_rows}
    engine = FakeEngine(n_slots, n_ubatch, timing=timing, **rows, **info)
    settings = KVFlashConfig(pool=n_slots, **{"tail": 2, **(config or {})})
    return make_session(
        engine,
        settings,
        n_ctx=n_ctx,
        n_batch=n_batch,
        n_ubatch=n_ubatch,
        block_order=order,
        scorer=scorer,
        stage=stage,
    )


def close(session: Sequence) -> None:
    session.close()
    assert session.engine.closed
    assert not session.engine.slabs, "host memory was not given back"
    assert session.store.heap._spill is None or session.store.heap._spill._file is None


def ints(*tokens: int) -> np.ndarray[Any, Any]:
    return np.array(tokens, np.int32)


def some(count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 1000, count, dtype=np.int32)
