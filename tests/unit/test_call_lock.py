"""Several threads on one text: no interrupt keeps the others waiting, and no stream goes on with another's text."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterator
from functools import partial

import numpy as np
import pytest
from support.interrupter import Interrupter, elsewhere, signalled

from kvflash_ggml.errors import KVFlashError
from kvflash_ggml.llama.call_lock import CallLock, changing, locked, writing

FILES = ("llama/call_lock.py",)


class Writer:
    """A text of letters, written as `Llama` writes its own."""

    def __init__(self) -> None:
        self._call_lock = CallLock()
        self.text = ""
        self.ended: list[str] = []  # the texts that streams ended with

    @locked
    def read(self) -> str:
        return self.text

    @changing
    def replace(self, text: str) -> None:
        self.text = text

    @changing
    def change_often(self) -> None:
        for letter in "abc":
            self.replace(letter)

    @writing
    def write(self, letter: str) -> Generator[str, str | None, None]:
        self.replace("")
        try:
            while True:
                self.text += (yield self.text) or letter
        finally:
            self.ended.append(self.text)

    @writing
    def write_through(self, callback: Callable[[], object]) -> Generator[str, None, None]:
        self.text = "m"
        while True:
            callback()
            yield self.text

    def close(self) -> None:
        with self._call_lock.lock:
            self._call_lock.close()


def whole(writer: Writer) -> None:
    list(writer._call_lock.whole(writer.write("w")))


def pieces(writer: Writer) -> None:
    stream = writer._call_lock.pieces(writer.write("p"))
    next(stream)
    next(stream)
    stream.close()  # type: ignore[attr-defined]


def stream(writer: Writer) -> None:
    stream = writer.write("s")
    next(stream)
    stream.send("t")
    stream.close()


def calls(writer: Writer) -> None:
    writer.replace("c")
    writer.change_often()
    writer.read()


def failing(writer: Writer) -> None:
    left = writer.write("f")
    next(left)
    writer.replace("g")
    with pytest.raises(KVFlashError):
        next(left)


WORKS = [whole, pieces, stream, calls, failing]


@pytest.mark.parametrize("work", WORKS)
def test_an_interrupt_keeps_nobody_waiting(work: Callable[[Writer], None]) -> None:
    k, interrupted = 0, True
    while interrupted:
        k += 1
        writer = Writer()
        left = writer.write("x")
        next(left)
        interrupted = Interrupter(k, FILES).run(lambda writer=writer: work(writer), writer.read)  # type: ignore[misc]
        elsewhere(lambda writer=writer: writer.replace("y"))  # type: ignore[misc]
        with pytest.raises(KVFlashError, match="another call has used this model"):
            next(left)
        assert writer.text == "y"
    assert k > 4


def test_a_stream_stops_once_its_text_was_replaced() -> None:
    writer = Writer()
    first = writer.write("a")
    assert [next(first), next(first)] == ["", "a"]
    writer.read()
    assert next(first) == "aa"
    second = writer.write("b")
    next(second)
    with pytest.raises(KVFlashError, match="another call has used this model"):
        next(first)
    writer.change_often()
    with pytest.raises(KVFlashError, match="another call has used this model"):
        next(second)


def test_a_stream_that_is_left_ends_with_its_own_text() -> None:
    """A garbage collector may drop it in the midst of any call, when another text is there."""
    for change, text in ((lambda writer: writer.replace("y"), "y"), (lambda writer: next(writer.write("b")), "")):
        writer = Writer()
        left = writer.write("a")
        assert [next(left), next(left)] == ["", "a"]
        change(writer)
        assert (writer.text, writer.ended[0]) == (text, "a")
        before = list(writer.ended)
        left.close()
        assert writer.ended == before


def test_a_stream_that_a_callback_drops() -> None:
    writer = Writer()
    left = writer.write("a")
    next(left)
    assert next(writer.write_through(left.close)) == "m"
    assert writer.ended == [""]


def test_a_piece_of_a_text_that_a_callback_has_replaced() -> None:
    writer = Writer()
    outer = writer.write_through(lambda: next(writer.write("i")))
    with pytest.raises(KVFlashError, match="another call has used this model"):
        next(outer)


@pytest.mark.parametrize("through", ["writing", "pieces"])
def test_dropping_a_stream_waits_for_no_lock(through: str) -> None:
    """A garbage collector drops it on a thread for which the lock's holder waits, as `close` waits for its workers."""
    writer = Writer()
    left = writer.write("a") if through == "writing" else writer._call_lock.pieces(writer.write("a"))
    next(left)
    with writer._call_lock.lock:
        elsewhere(left.close)  # type: ignore[attr-defined]
        assert writer.ended == []
    writer.close()
    assert writer.ended == [""]


def test_dropping_a_stream_on_another_thread_ends_it() -> None:
    writer = Writer()
    left = writer.write("a")
    next(left)
    elsewhere(left.close)
    assert writer.ended == [""]


@pytest.fixture
def _uncollected() -> Iterator[None]:
    """An interrupt within somebody's callback of the collector would reach nobody."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.slow
@pytest.mark.usefixtures("_uncollected")
@pytest.mark.parametrize("work", WORKS)
def test_real_signals_keep_nobody_waiting(work: Callable[[Writer], None]) -> None:
    hits = 0
    for seconds in np.random.default_rng(0).uniform(1e-5, 5e-4, 1500):
        writer = Writer()

        def many(writer: Writer = writer) -> None:
            for _ in range(2000):
                work(writer)

        hits += signalled(many, writer.read, float(seconds))
    assert hits


def test_after_close_every_call_says_so() -> None:
    writer = Writer()
    left, new = writer.write("a"), writer.write("b")
    next(left)
    elsewhere(writer.close)
    for call in (writer.read, partial(writer.replace, ""), partial(next, left), partial(next, new)):
        with pytest.raises(KVFlashError, match="this model is closed"):
            call()
