"""Copies of what is not pooled, on an engine whose device works beside the host."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from support.fake_engine import FakeEngine
from support.saving import making, text

from kvflash_ggml.session import copies
from kvflash_ggml.session.copies import StateCopies
from kvflash_ggml.session.session import Session
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
    made = StateCopies(engine)
    yield made
    made.close()
    assert not engine.slabs


@pytest.fixture
def world() -> Iterator[Callable[..., Session]]:
    with making() as build:
        yield build


def with_state(engine: FakeEngine, size: int) -> bytes:
    engine._state = text(size).tolist()
    return engine.get_state()


def test_a_copy_outlives_the_next_one(engine: FakeEngine, made: StateCopies) -> None:
    """They go through the same memory, each when the one before has left it."""
    go, copied = threading.Event(), copies._copied

    def slowly(*args: Any) -> memoryview:
        assert go.wait(20)
        return copied(*args)

    with mock.patch.object(copies, "_copied", slowly):
        first = with_state(engine, 50)
        one = made.copy()
        assert made.read(one) == first, "nobody waits for the copy"
        assert not one.copy.done()  # type: ignore[attr-defined]
        threading.Timer(0.05, go.set).start()
        second = with_state(engine, 40)
        other = made.copy()
    assert (one.read(), made.read(one), one.size) == (first, first, len(first))
    assert (other.read(), made.read(other)) == (second, second)
    assert len(engine.slabs) == 1


def test_larger_states_take_more_memory(engine: FakeEngine, made: StateCopies) -> None:
    blobs = {with_state(engine, size): made.copy() for size in (20, 10, 30, 31)}
    assert all(blob.read() == made.read(blob) == state for state, blob in blobs.items())
    assert engine.allocated == 4 * 33


def test_without_page_locked_memory_copies_are_made_at_once(engine: FakeEngine, made: StateCopies) -> None:
    engine.refuse_alloc = True
    state, blob = with_state(engine, 9), made.copy()
    assert blob == Bytes(state)
    assert made.read(blob) == state


@pytest.mark.parametrize("info", [{"asynchronous": False}, {"recurrent": False}])
def test_where_nothing_is_won_there_is_no_memory(info: dict[str, Any]) -> None:
    engine = FakeEngine(256, 64, **{"recurrent": True, "asynchronous": True} | info)
    made = StateCopies(engine)
    assert isinstance(made.copy(), Bytes)
    assert not engine.slabs
    made.close()


@pytest.mark.parametrize("window", [0, 80])
def test_texts_go_back_and_change_places(window: int, world: Any) -> None:
    """At each step the engine looks whether its state is that of the text."""
    chance = random.Random(window)
    session = world(recurrent=True, asynchronous=True, n_swa=window)
    session.extend(text(300))
    aside = [(session.state(), session.engine.truth[:])]
    for turn in range(40):
        session.extend(text(chance.randrange(1, 200), turn))
        if chance.random() < 0.5:
            session.checkpoints.before_step(session.length, wanted=True)
        if chance.random() < 0.5:
            session.rewind_to(chance.randrange(session.length // 2, session.length))
        if chance.random() < 0.4:
            state = session.engine.get_state()
            aside.append((session.state(), session.engine.truth[:]))
            assert aside[-1][0].state.read() == state
        if chance.random() < 0.4 or session.length > 3000:
            saved, truth = chance.choice(aside)
            session.load(saved.share())
            session.engine.adopt(truth, saved.tokens.tolist())
    for saved, _ in aside:
        saved.release()
