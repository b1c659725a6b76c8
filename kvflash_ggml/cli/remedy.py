"""What the library's errors mean on the command line."""

from __future__ import annotations

_CONTEXT_FULL = "exceed context window"


def in_words(error: BaseException) -> str:
    """The error's text, with the option that helps."""
    text = str(error) or type(error).__name__
    if _CONTEXT_FULL in text:
        text += ": give a larger context with -c (0 is the length the model was trained for), or a shorter prompt"
    return text
