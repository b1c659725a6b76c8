"""Lets several threads use one model, which holds one text: their calls take turns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from functools import wraps
from types import GeneratorType
from typing import Any, TypeVar

from ..errors import CLOSED, KVFlashError

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class CallLock:
    """A lock that a call holds to its end, and a generator while it makes its next piece.

    A generator may be advanced on another thread each time, or never again: so it keeps nobody waiting between two
    pieces. But it cannot go on when the text has changed meanwhile.

    lock: to be entered by `with` itself. An interrupt cannot come between a block and a lock written in C; it can come
    at the start of an `__enter__` or `__exit__` of our own, and then no other thread would ever get the lock.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._closed = False
        self._writer: GeneratorType[Any, Any, Any] | None = None  # the generator whose text it is

    def close(self) -> None:
        """Refuse all calls from now on. The caller has the lock."""
        self._closed = True
        self.take()

    def check_open(self) -> None:
        """Raise KVFlashError for a model that was closed. The caller has the lock."""
        if self._closed:
            raise KVFlashError(CLOSED)

    def take(self) -> None:
        """Give the text to the call that has the lock, unless the text's generator has made that call.

        The generator ends here, while the text is still its own.
        """
        if self._writer is not None and not self._writer.gi_running:
            self._writer.close()
            self._writer = None

    def whole(self, stream: Generator[T, Any, Any]) -> Iterator[T]:
        """Yield the only piece of a generator, which is closed in the same turn."""
        with self.lock:
            self.check_open()
            piece = next(stream)
            stream.close()
        yield piece

    def pieces(self, stream: Generator[T, Any, Any]) -> Iterator[T]:
        """Yield what a generator does, each piece in a turn of its own."""
        try:
            while True:
                with self.lock:
                    self.check_open()
                    try:
                        piece = next(stream)
                    except StopIteration:
                        return
                yield piece
        finally:
            stream.close()  # without the lock: what changes the text has its own turn to end

    def writing(self, stream: GeneratorType[T, Any, Any]) -> Generator[T, Any, None]:
        """Yield what a generator does that changes the text, and send it values. KVFlashError once another call has."""
        sent: Any = None
        begun = False
        try:
            while True:
                with self.lock:
                    if self._closed:  # asked before each token
                        raise KVFlashError(CLOSED)
                    if not begun:
                        self.take()
                        self._writer, begun = stream, True
                    if self._writer is stream:
                        try:
                            piece = stream.send(sent)
                        except StopIteration:
                            return
                    if self._writer is not stream:  # somebody else, or a callback of its own that has just run
                        stream.close()
                        raise KVFlashError(
                            "another call has used this model since, and its text is gone: read a stream to its end "
                            "before the next call, or make one Llama for each"
                        )
                sent = yield piece
        finally:
            self._leave(stream)

    def _leave(self, stream: GeneratorType[Any, Any, Any]) -> None:
        """End a generator that nobody advances any more.

        A garbage collector may call this on any thread and in the midst of any call. So nothing is done for a text that
        is gone, and no thread waits but the main one: the lock's holder may wait for the thread. Who takes the text
        next ends the generator then.
        """
        if self._writer is not stream or stream.gi_running:
            return
        if threading.current_thread() is threading.main_thread():  # no interrupt may come behind an `acquire`
            with self.lock:
                stream.close()
        elif self.lock.acquire(blocking=False):
            try:
                stream.close()
            finally:
                self.lock.release()


def locked(method: F) -> F:
    """Lock a method that reads what the model holds."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._call_lock.lock:
            self._call_lock.check_open()
            return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]


def changing(method: F) -> F:
    """Lock a method after which no generator can go on with its text."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._call_lock.lock:
            self._call_lock.check_open()
            self._call_lock.take()
            return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]


def writing(method: F) -> F:
    """Let a generator continue the text."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._call_lock.writing(method(self, *args, **kwargs))

    return call  # type: ignore[return-value]
