"""Reads one answer as it is written: content, reasoning and calls of functions, and loses nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .values import Delta, Grammar, Said


class AnswerReader:
    """Use one for each answer, on one thread at a time. No call raises for anything that a model may write."""

    said: Said
    """What all deltas so far come to. At the end, the whole answer."""

    odd: bool
    """Was something not understood, and became content? The answer has then ended by "stop", not by its calls."""

    def push(self, text: str, *, end: bool = False) -> list[Delta]:
        """Take more text of the answer, and return what that adds to it. end: with the last text, which may be empty.

        An answer is parsed as a whole each time: push what has come in 50 ms or 16 tokens at once.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A chat as a prompt, and how its answer is made and read.

    grammar: None for any text. preserved: special tokens that the answer shows as text. stops: further stop texts.
    borders: how a message begins, as (role, text). thinks: does the template know reasoning? reader: makes a reader of
    one answer.
    """

    prompt: str
    grammar: Grammar | None = None
    preserved: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    borders: tuple[tuple[str, str], ...] = ()
    thinks: bool = False
    reader: Callable[[], AnswerReader]
