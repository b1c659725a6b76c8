"""How the package's log looks on a terminal."""

from __future__ import annotations

import logging

NAME = "kvflash_ggml"


class Formatter(logging.Formatter):
    """`kvflash: warning: text`; the banner and other information begin with `kvflash: ` alone."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if message.startswith("kvflash: "):
            return message
        return f"kvflash: {record.levelname.lower()}: {message}"


def show_on(handler: logging.Handler, level: int) -> None:
    """The log goes to this handler alone."""
    handler.setFormatter(Formatter())
    logger = logging.getLogger(NAME)
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(level)
