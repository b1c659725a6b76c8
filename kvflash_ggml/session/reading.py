"""How a text is read and answered: by what the pool holds, or by all of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reading:
    """exact: prompts see the whole text, through stages. answers_exactly: so does every generated token. why: the
    reason, for people, where it is not what was asked for or where that was left open.
    """

    exact: bool = False
    answers_exactly: bool = False
    why: str = ""


POOL = Reading()
