"""Copies of what is not pooled, on an engine whose device works beside the host."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.fake_engine import FakeEngine
from support.saving import make, making, text

from kvflash_ggml.errors import SnapshotError
from kvflash_ggml.sequence import copies, restore
from kvflash_ggml.sequence.copies import THREADS, StateCopies
from kvflash_ggml.sequence.prefill import extend, rewind_to
from kvflash_ggml.sequence.sequence import Sequence
from kvflash_ggml.state.blob import Bytes


@pytest.fixture(autouse=True)
def small_states() -> Iterator[None]:
    with mock.patch.object(copies, "LEAST", 1):
        yield


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(256, 64, recurrent=True, asynchronous=True)


@pytest.fixture
def made(engine: FakeEngine) -> Iterator[StateCopies]:
    made = StateCopies(engine, 0)
    yield made
    made.close()
    assert not engine.slabs


@pytest.fixture
def world() -> Iterator[Callable[..., Sequence]]:
    with making() as build:
        yield build


def with_state(engine: FakeEngine, size: int, seed: int = 0) -> bytes:
    engine._state = text(size, seed).tolist()
    return engine.get_state(seq=0)


def put(engine: FakeEngine, made: StateCopies, blob: Any) -> bytes:
    engine._state = None
    made.put(blob, blob.size // 4 - 2)
    return engine.get_state(seq=0)


def test_a_copy_outlives_the_next_one(engine: FakeEngine, made: StateCopies) -> None:
    """They go through the same memory, each when the one before has left it."""
    go, copyto = threading.Event(), np.copyto

    def slowly(*args: Any) -> None:
        assert go.wait(20)
        copyto(*args)

    with mock.patch.object(np, "copyto", slowly):
        first = with_state(engine, 50)
        one = made.copy()
        assert put(engine, made, one) == first, "nobody waits for the copy"
        assert isinstance(one, Bytes)
        assert (len(one.pieces), any(piece.done() for piece in one.pieces)) == (THREADS, False)
        threading.Timer(0.05, go.set).start()
        second = with_state(engine, 40)
        other = made.copy()
    assert one.read() == first
    assert other.read() == second
    for blob, state in ((one, first), (one, first), (other, second), (Bytes(first), first), (other, second)):
        assert put(engine, made, blob) == state
    assert len(engine.slabs) == 1


def test_nothing_waits_until_a_state_is_on_the_host(engine: FakeEngine, made: StateCopies) -> None:
    """Steps overlap on several devices: a wait between two of them would empty all."""
    state = with_state(engine, 50)
    with mock.patch.object(engine, "_run_up_to", side_effect=AssertionError("the device was waited for")):
        blob = made.copy()
        assert isinstance(blob, Bytes)
        assert not any(piece.done() and piece.exception() is None for piece in blob.pieces)
    assert made.copy().read() == state


def test_larger_states_take_more_memory(engine: FakeEngine, made: StateCopies) -> None:
    blobs = {with_state(engine, size): made.copy() for size in (20, 1, 30, 31)}
    assert all(blob.read() == put(engine, made, blob) == state for state, blob in blobs.items())
    assert engine.allocated == 4 * 33


def test_a_state_that_does_not_fit(engine: FakeEngine, made: StateCopies) -> None:
    state, blob = with_state(engine, 9), made.copy()
    with pytest.raises(SnapshotError):
        made.put(Bytes(b"of another shape"), 9)
    assert put(engine, made, blob) == state


@pytest.mark.parametrize(("first", "then"), [(40, 20), (20, 40)])
def test_a_copy_that_was_interrupted_ends_before_the_next(
    first: int, then: int, engine: FakeEngine, made: StateCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads go on: what follows is put in the same memory, or copied to memory in place of it."""
    state = with_state(engine, first)
    made.copy().read()
    other = with_state(engine, then, 1)
    go, copyto, free = threading.Event(), np.copyto, engine.free
    busy: list[int] = []
    waits: list[int] = []
    first_piece = np.frombuffer(state, np.uint8)[:1]

    def slowly(to: Any, source: Any) -> None:
        busy.append(1)
        if np.shares_memory(source, first_piece):
            assert go.wait(20)
        copyto(to, source)
        busy.pop()

    def freed(address: int) -> None:
        assert not busy, "its threads write there"
        free(address)

    def interrupted(pieces: Any) -> None:
        waits.append(1)
        if len(waits) == 2:  # for the copy
            raise KeyboardInterrupt

    monkeypatch.setattr(np, "copyto", slowly)
    monkeypatch.setattr(engine, "free", freed)
    with monkeypatch.context() as patch:
        patch.setattr(copies, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.put(Bytes(state), first)
    threading.Timer(0.05, go.set).start()
    if then <= first:
        assert put(engine, made, Bytes(other)) == other
    else:
        assert made.copy().read() == other


def test_a_state_that_is_put_back_allocates_nothing(engine: FakeEngine, made: StateCopies) -> None:
    """To page-lock memory takes longer than to copy a state from where it is."""
    state = with_state(engine, 50)
    assert put(engine, made, Bytes(state)) == state
    assert not engine.slabs
    smaller = with_state(engine, 9)
    made.copy()
    assert put(engine, made, Bytes(state)) == state
    assert engine.allocated == len(smaller)


def test_nobody_is_kept_by_it(engine: FakeEngine, made: StateCopies) -> None:
    with_state(engine, 9)
    first = made.copy()
    assert made._newest() is first
    del first
    gc.collect()
    assert made._newest() is None


def test_without_page_locked_memory_copies_are_made_at_once(engine: FakeEngine, made: StateCopies) -> None:
    engine.refuse_alloc = True
    state, blob = with_state(engine, 9), made.copy()
    assert blob == Bytes(state)
    assert put(engine, made, blob) == state


@pytest.mark.parametrize("info", [{"asynchronous": False}, {"recurrent": False}])
def test_where_nothing_is_won_there_is_no_memory(info: dict[str, Any]) -> None:
    engine = FakeEngine(256, 64, **{"recurrent": True, "asynchronous": True} | info)
    made = StateCopies(engine, 0)
    blob = made.copy()
    assert isinstance(blob, Bytes)
    made.put(blob, 0)
    assert not engine.slabs
    made.close()


def test_a_garbage_collector_may_close_it_where_it_copies() -> None:
    """That comes behind the copies."""
    session = make(recurrent=True, asynchronous=True)
    extend(session, text(300))
    session.checkpoints.before_step(300, wanted=True)
    copied, worker = session.checkpoints.at(300), session.checkpoints.copies.workers[1]
    worker.submit(session.close).result(20)
    worker._executor.shutdown()
    assert session.engine.closed
    assert not session.engine.slabs  # type: ignore[attr-defined]
    assert len(copied.read()) == 4 * 302


@pytest.mark.parametrize("window", [0, 80])
def test_texts_go_back_and_change_places(window: int, world: Any) -> None:
    """At each step the engine looks whether its state is that of the text."""
    chance = random.Random(window)
    session = world(recurrent=True, asynchronous=True, n_swa=window)
    extend(session, text(300))
    aside = [(restore.state(session), session.engine.truth[:])]
    for turn in range(40):
        extend(session, text(chance.randrange(1, 200), turn))
        if chance.random() < 0.5:
            session.checkpoints.before_step(session.length, wanted=True)
        if chance.random() < 0.5:
            rewind_to(session, chance.randrange(session.length // 2, session.length))
        if chance.random() < 0.4:
            state = session.engine.get_state(seq=0)
            aside.append((restore.state(session), session.engine.truth[:]))
            assert aside[-1][0].state.read() == state
        if chance.random() < 0.4 or session.length > 3000:
            saved, truth = chance.choice(aside)
            restore.load(session, saved.share())
            session.engine.adopt(truth, saved.tokens.tolist())
    for saved, _ in aside:
        saved.release()
