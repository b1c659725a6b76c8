"""What the steps of a prompt and of an answer see: the pool, or the whole text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..constants import CHUNK
from ..pool.masks import View, choose, everything_is_resident, lies_in_order

if TYPE_CHECKING:
    from ..pool.page_table import PageTable
    from ..pool.plan import Chunk, Plan
    from ..pool.residency import Ranking
    from .pool import Pool


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
    them. generated, generated_whole: the same of the answer. previewed: tokens of a prompt of which a preview has read
    `read`; 0 for other answers.

    ranked: how the resident set at the beginning of the answer was chosen. "exact": by the attention of the prompt's
    end to every key in view, and by the index for keys out of view. "index": by the index, for the reason `ranked_why`.
    Empty where nothing was chosen, and where the policy has its own way.
    """

    read: int = 0
    read_whole: int = 0
    generated: int = 0
    generated_whole: int = 0
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


class AttentionSpan:
    """Decides what the steps of one text see: the pool, or chunks in the layer buffers.

    bounded: the text can outgrow its share of the pool, whose first block is `first`.
    """

    def __init__(self, pool: Pool, table: PageTable, *, first: int, bounded: bool) -> None:
        self._pool = pool
        self._table = table
        self._first = first
        self._bounded = bounded
        self._known_chunks: list[Chunk] = []
        self._all_resident = self._in_order = True

    @property
    def tokens(self) -> int:
        """Tokens that a streamed step can see at least, its own included; 0 without layer buffers."""
        max_images = self._pool.heap.max_images
        return self._pool.stage_slots if max_images is None else min(self._pool.stage_slots, max_images * CHUNK)

    def of(
        self, plan: Plan, start: int, count: int, ranking: Ranking | None, *, stream: bool
    ) -> tuple[View | None, bool]:
        """Return the view of a step of `count` tokens at `start`, None for the pool, and whether it sees everything.

        stream: the step may use layer buffers. It also uses them where the pool has the whole text, but in other blocks
        than a full cache: attention sums in the order of blocks, and would round differently.
        """
        if not self._bounded:
            return None, True
        layout = plan.layout
        if self._known_chunks is not layout.chunks:  # not `epoch`: a dropped plan had the same one
            self._known_chunks, self._all_resident = layout.chunks, everything_is_resident(layout, start)
            self._in_order = lies_in_order(layout, self._first)
        ordered = self._all_resident and (self._in_order or start < CHUNK)  # a layer buffer begins with a sealed chunk
        if ordered or not stream:
            return None, self._all_resident
        room = (self._pool.stage_slots - count - start % CHUNK) // CHUNK
        if self._pool.heap.max_images is not None:
            room = min(room, self._pool.heap.max_images)  # all images of a step must be in memory together
        if room < (start // CHUNK if self._all_resident else 1):
            return None, self._all_resident
        first, last = start // CHUNK, (start + count - 1) // CHUNK
        view = choose(start, room, self._table.protected(first, last), ranking)
        return view, view.whole
