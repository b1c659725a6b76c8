"""How the package's log looks on a terminal."""

from __future__ import annotations

import logging
from functools import cache

NAME = "kvflash_ggml"


class Formatter(logging.Formatter):
    """`kvflash: warning: text`; the banner and other information begin with `kvflash: ` alone. Tracebacks follow."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if message.startswith("kvflash: "):
            return message
        told = f"kvflash: {record.levelname.lower()}: {message}"
        return f"{told}\n{self.formatException(record.exc_info)}" if record.exc_info else told


def show_on(handler: logging.Handler, level: int) -> None:
    """The log goes to this handler alone."""
    handler.setFormatter(Formatter())
    logger = logging.getLogger(NAME)
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(level)


@cache
def warn_once(text: str) -> None:
    """Log a warning that this process has not logged before."""
    logging.getLogger(NAME).warning(text)
