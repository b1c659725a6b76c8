"""What a drafter knew of a text that has been put aside."""

from __future__ import annotations

from dataclasses import dataclass, field

from .blob import Blob


@dataclass(frozen=True, slots=True)
class Origin:
    """Which drafter it was. Only one of the same origin can go on from what it knew.

    name: its kind. model: a hash of its file. window: tokens that it sees at most. types: ggml's, of its K and V.
    """

    name: str
    model: str
    window: int
    types: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedDraft:
    """length: tokens of the text that it was told of. first, end: the positions that its context holds, from `first` to
    before `end`. context: them, as llama.cpp writes them. rows: f32, what the target computed for the newest tokens, as
    the drafter wants it; empty if it keeps none.
    """

    origin: Origin
    length: int
    first: int
    end: int
    context: Blob = field(repr=False)
    rows: Blob = field(repr=False)

    @property
    def size(self) -> int:
        """Bytes, wherever they are."""
        return self.context.size + self.rows.size
