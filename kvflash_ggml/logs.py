"""How the package tells what it does: its log on a terminal, and progress."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

NAME = "kvflash_ggml"

Progress = Callable[[int, int], None]
"""Called with what has been done, and all that is to be done."""


class Formatter(logging.Formatter):
    """`kvflash: warning: text`; the banner and other information begin with `kvflash: ` alone. Tracebacks follow."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if message.startswith("kvflash: "):
            return message
        told = f"kvflash: {record.levelname.lower()}: {message}"
        return f"{told}\n{self.formatException(record.exc_info)}" if record.exc_info else told


def show_on(handler: logging.Handler, level: int) -> None:
    """Send the log to this handler alone."""
    handler.setFormatter(Formatter())
    logger = logging.getLogger(NAME)
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(level)


@cache
def warn_once(text: str) -> None:
    """Log a warning that this process has not logged before."""
    logging.getLogger(NAME).warning(text)


@contextmanager
def logged(what: str, *names: str) -> Iterator[None]:
    """Log an error, and go on behind the block."""
    try:
        yield
    except Exception:
        logging.getLogger(NAME).exception(what, *names)


@contextmanager
def held() -> Iterator[None]:
    """Show warnings after the answer, which they would cut in two on a terminal. With `-v` each comes at once."""
    from logging.handlers import MemoryHandler  # late: it brings sockets and pickle

    logger = logging.getLogger(NAME)
    if logger.getEffectiveLevel() < logging.WARNING or not logger.handlers:
        yield
        return
    shown = logger.handlers[:]
    holding = MemoryHandler(sys.maxsize, flushLevel=sys.maxsize, target=shown[0])
    logger.handlers[:] = [holding]
    try:
        yield
    finally:
        logger.handlers[:] = shown
        holding.close()
