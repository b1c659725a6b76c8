"""A drafter as the loop keeps it: what it was told of the text, and whether it is still given what it looks at."""

from __future__ import annotations

from dataclasses import dataclass, field

from .base import Drafter, Sometimes

MAX_BAD = 3
"""Drafts in a row that cannot be verified, after which a drafter is not asked any more; the same of failed steps."""

UNASKED = 64
"""Steps without a draft, after which one that was not asked in them is not given anything of the target's compute any
more: to read that takes time at each step."""

AGAIN = 8
"""What is left of these steps when a prompt was read: of that everybody is given what he wants."""

WARM = 32
"""Tokens that one which was given nothing for a while has to be given before it is asked again."""


@dataclass(slots=True)
class Asked:
    """A drafter. known: how much of the text it was told. read: how long the text was when it was asked last.

    bad: drafts in a row that could not be verified; why: what was wrong, of one that is not asked any more. deciding:
    seconds that it took last to find out what its draft is worth. unasked: steps without a draft since it was asked.
    missing: tokens it has to be given before it is asked.
    """

    drafter: Drafter
    known: int = 0
    read: int = 0
    bad: int = 0
    why: str = ""
    deciding: float = 0.0
    unasked: int = 0
    missing: int = 0
    _sometimes: Sometimes | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._sometimes = self.drafter if isinstance(self.drafter, Sometimes) else None

    @property
    def failed(self) -> bool:
        return self.bad >= MAX_BAD

    @property
    def able(self) -> bool:
        """May it have something to say?"""
        return not self.failed and (self._sometimes is None or self._sometimes.able)

    @property
    def follows(self) -> bool:
        """Is it given what it wants of each step?"""
        return not self.failed and self.unasked <= UNASKED

    def reads(self, count: int, *, ahead: bool) -> bool:
        """A step has computed so many tokens: is it to be given what it wants of them?"""
        if count == 1:
            self.unasked += 1
        elif not ahead:
            self.unasked = min(self.unasked, UNASKED - AGAIN)
        if not self.follows:
            self.missing = WARM
        return self.follows and bool(self.drafter.wants)

    def behind(self, length: int) -> int:
        """How much of a text of so many tokens it reads before it drafts."""
        if self.missing:
            return self.missing  # and nothing before these
        newest = self.drafter.wants.newest
        return length - self.read if newest is None else min(newest, length - self.read)

    def truncate(self, length: int) -> None:
        """The text has `length` tokens left."""
        self.known, self.read = min(self.known, length), min(self.read, length)

    def told(self, start: int, count: int) -> None:
        """It is given what it wants of these."""
        if start > self.known:
            self.read = start
        self.known = start + count
        self.missing = max(0, self.missing - count)

    def is_ready(self) -> bool:
        """Can it be asked? It is given what it wants from now on."""
        self.unasked = 0
        return not (self.drafter.wants and self.missing)
