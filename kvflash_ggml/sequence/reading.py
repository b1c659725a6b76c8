"""How a text is read and answered: by what the pool holds, or by all of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reading:
    """exact: prompts see the whole text, through stages. answers_exactly: so does every generated token. why: where
    that was left open, or could not be had, the reason, for people.
    """

    exact: bool = False
    answers_exactly: bool = False
    why: str = ""


POOL = Reading()


@dataclass(slots=True)
class ReadStats:
    """What the newest request has lost against full attention, in tokens.

    read: of its prompt, those that were not known already. read_whole: of these, those that saw the whole text before
    them. generated, generated_whole: the same of its answer. repaired, changed: always 0,
    kept for programs that read them.

    previewed: tokens of a prompt of which a preview has read `read`; 0 for an answer that is none.

    ranked: what decided which text is resident when the answer begins: "exact", the attention of the prompt's end to
    every key that was in view (of what was not, the index), or "index", a look at it, and ranked_why for which reason;
    empty where nothing was chosen, and where the policy has a way of its own.
    """

    read: int = 0
    read_whole: int = 0
    generated: int = 0
    generated_whole: int = 0
    repaired: int = 0
    changed: int = 0
    seen: float = 0.0
    previewed: int = 0
    ranked: str = ""
    ranked_why: str = ""

    def add_read(self, count: int, share: float) -> None:
        """A step of the prompt saw such a share of the text before it, 0 to 1."""
        self.read += count
        self.read_whole += count if share == 1 else 0
        self.seen += count * share

    @property
    def view(self) -> float | None:
        """Share of the text before them that the tokens of the prompt saw, 0 to 1; None if none were read."""
        return self.seen / self.read if self.read else None
