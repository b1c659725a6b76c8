"""A model holds one text: what several threads ask of it is done in turns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from functools import wraps
from typing import Any, TypeVar

from ..errors import KVFlashError

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class Turns:
    """A lock that a call holds to its end, and a generator while it makes its next piece.

    A generator may be advanced on another thread each time, or never again: so it keeps nobody waiting between two
    pieces. But it cannot go on when the text has changed meanwhile.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._writer: object = None  # the generator whose text it is

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        self._lock.release()

    def take(self) -> None:
        """The text belongs to the call that has the lock, unless a generator has called it."""
        if self._depth == 1:
            self._writer = None

    def whole(self, stream: Generator[T, Any, Any]) -> Iterator[T]:
        """The only piece of a generator, which is closed in the same turn."""
        with self:
            piece = next(stream)
            stream.close()
        yield piece

    def pieces(self, stream: Generator[T, Any, Any]) -> Iterator[T]:
        """A generator, each piece in a turn of its own."""
        try:
            while True:
                with self:
                    try:
                        piece = next(stream)
                    except StopIteration:
                        return
                yield piece
        finally:
            with self:
                stream.close()

    def writing(self, stream: Generator[T, Any, Any]) -> Generator[T, Any, None]:
        """The same for one that changes the text, and can be sent values. KVFlashError once somebody else has."""
        sent: Any = None
        begun = False
        try:
            while True:
                with self:
                    if begun and self._writer is not stream:
                        raise KVFlashError(
                            "another call has used this model since, and its text is gone: read a stream to its end "
                            "before the next call, or make one Llama for each"
                        )
                    self._writer, begun = stream, True
                    try:
                        piece = stream.send(sent)
                    except StopIteration:
                        return
                sent = yield piece
        finally:
            with self:
                stream.close()


def in_turn(method: F) -> F:
    """A method that reads what the model holds."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._turns:
            return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]


def changing(method: F) -> F:
    """A method after which no generator can go on with its text."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._turns:
            self._turns.take()
            return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]


def writing(method: F) -> F:
    """A generator that continues the text."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._turns.writing(method(self, *args, **kwargs))

    return call  # type: ignore[return-value]
