"""What the steps of a prompt and of an answer see: the pool, or the whole text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reading:
    """exact: prompts see the whole text, through layer buffers. answers_exactly: so does every generated token. why:
    the reason, for people, where the mode was chosen automatically or could not be had.
    """

    exact: bool = False
    answers_exactly: bool = False
    why: str = ""


POOL = Reading()


@dataclass(slots=True)
class ReadStats:
    """What the newest request lost against full attention, in tokens.

    read: tokens of the prompt that were not known already. read_whole: of these, tokens that saw the whole text before
    them. generated, generated_whole: the same of the answer. repaired, changed: always 0, kept for programs that read
    them. previewed: tokens of a prompt of which a preview has read `read`; 0 for other answers.

    ranked: how the resident set at the beginning of the answer was chosen. "exact": by the attention of the prompt's
    end to every key in view, and by the index for keys out of view. "index": by the index, for the reason `ranked_why`.
    Empty where nothing was chosen, and where the policy has its own way.
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
        """Count a step of the prompt that saw `share` of the text before it, 0 to 1."""
        self.read += count
        self.read_whole += count if share == 1 else 0
        self.seen += count * share

    @property
    def view(self) -> float | None:
        """Share of the text before them that the tokens of the prompt saw, 0 to 1; None if none were read."""
        return self.seen / self.read if self.read else None
