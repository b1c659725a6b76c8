"""What the library's errors mean on the command line."""

from __future__ import annotations

import errno
import os

_CONTEXT_FULL = "exceed context window"

_FLAGS = {
    "host_limit = ": "--kvflash-host-limit ",
    "host_limit": "--kvflash-host-limit",
    "spill = ": "--kvflash-spill ",
    "a spill folder": "a folder with --kvflash-spill",
}
"""Options that the library names by their keywords, the longest name first."""


def in_words(error: BaseException) -> str:
    """The error's text, with the option that helps. What the system refuses becomes a sentence without its number."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        name = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else str(error.filename)
        helps = "Make room there." if error.errno == errno.ENOSPC else "Check the name, and who may use it."
        return f"{name}: {error.strerror}. {helps}"
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    for keyword, flag in _FLAGS.items():
        text = text.replace(keyword, flag)
    if _CONTEXT_FULL in text:
        text += ": give a larger context with -c (0 is the length the model was trained for), or a shorter prompt"
    return text
