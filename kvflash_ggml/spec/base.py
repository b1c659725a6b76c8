"""What a drafter is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..arrays import Floats, Int32s
from ..state.draft import SavedDraft
from .draft import Draft


@dataclass(frozen=True, slots=True)
class Features:
    """What a drafter is given of the target's compute for each token, beside the token.

    layers: the inputs of these layers, one after the other. nextn: the state after the last layer, in front of the
    head, as the target's own heads for further tokens want it. newest: of how many tokens it is ever looked at, the
    newest ones; None for all.
    """

    layers: tuple[int, ...] = ()
    nextn: bool = False
    newest: int | None = None

    def __bool__(self) -> bool:
        return bool(self.layers) or self.nextn


class Drafter(Protocol):
    """Proposes what may follow a text. It is asked between steps, on the thread that computes.

    name: for people. wants: what `observe` is given beside tokens; known before anything is observed.
    """

    name: str
    wants: Features

    def observe(self, start: int, tokens: Int32s, rows: Floats | None) -> None:
        """These tokens, from position `start` on, are of the text: each once, in order.

        Positions from `start` on that were known before are void. There may be a gap before `start` where text was
        put back that nobody has evaluated. rows: what it wants of each, [len(tokens), width]; None if it wants nothing,
        or they were not computed here.
        """
        ...

    def propose(self, root: int, most: int) -> Draft | None:
        """What may follow the text that was observed and then `root`: at most `most` tokens, None for nothing."""
        ...

    def truncate(self, length: int) -> None:
        """The text ends after `length` tokens. It may forget more."""
        ...

    def close(self) -> None:
        """Give back what it holds. Can be called again."""
        ...


@runtime_checkable
class Sometimes(Protocol):
    """A drafter of which it is known without asking whether it has anything to say now."""

    @property
    def able(self) -> bool: ...


@runtime_checkable
class Remembering(Protocol):
    """A drafter that had to read what it knows of a text, and can be spared that."""

    def state(self) -> SavedDraft | None:
        """What it knows of the text that was observed, which it reads to its end; None for nothing.

        SnapshotError if it cannot be put aside.
        """
        ...

    def load(self, saved: SavedDraft) -> None:
        """Know what one of the same origin knew, after the text was cut to nothing.

        SnapshotError, and nothing known, if it is of another origin, or damaged.
        """
        ...
