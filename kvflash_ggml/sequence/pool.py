"""The parts that the texts of a pool share: one engine, the page images, and room for mask rows."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

import numpy as np

from ..arrays import Int32s
from ..constants import CHUNK, round_up
from ..errors import ConfigError
from ..host.heap import PageHeap
from ..media.rows import MediaRows, Part, advances_of, are_mutual
from ..pool.masks import AlibiMask, AlibiStageMask, MaskRows, SlotMask, StageMask
from ..pool.page_table import BlockAllocator, PageTable
from ..pool.shares import Claim, dealt, sizes
from .copies import DeviceStates
from .device_index import Room
from .draft_rows import DraftRows
from .step import NO_LOGITS, Logits

if TYPE_CHECKING:
    from ..native.engine import PagedEngine
    from .step import Step


INDEX_STEP = 256
"""Bytes. Index rows of a text begin at a multiple of it: a kernel reads 16 at once."""


class TextOnPool(Protocol):
    """A text on the pool."""

    seq: int
    ids: Int32s
    logits: Logits
    table: PageTable
    draft_rows: DraftRows | None
    unchecked: bool

    def give_up(self) -> None: ...

    def settle(self) -> None: ...

    def shrink(self, max_blocks: int) -> None: ...


class Padding:
    """Fills a step up to a row for each sequence of the context: then a row alone has the bits that it has among
    others.

    Each padding row belongs to a sequence without a token in the step. It is at that sequence's next position, in a
    slot that no text can have. It sees only itself, no other row sees it, and its slot is empty again after the step.
    ends: returns how many tokens a sequence has in memory.

    ConfigError for recurrent state and sliding windows, where a row cannot be taken back without a trace.
    """

    def __init__(self, engine: PagedEngine, rows: MaskRows, ends: Callable[[int], int]) -> None:
        info = engine.info
        if info.recurrent or info.n_swa:
            what = "recurrent state" if info.recurrent else "a sliding window"
            raise ConfigError(
                f"deterministic_batch: steps of a fixed number of rows need memory that is pooled, and this model has"
                f" {what}: leave it out"
            )
        self.width = info.n_seq
        self._engine = engine
        self._rows = rows
        self._ends = ends
        engine.fix_view()  # bits can depend on the number of slots that a kernel reads
        self._slot = info.n_slots - self.blocks(info.n_seq) * CHUNK

    @staticmethod
    def blocks(n_seq: int) -> int:
        """Return how many blocks at the end of the pool no text can have."""
        return -(-n_seq // CHUNK)

    def fill(self, first: int, taken: Container[int]) -> int:
        """Write rows from `first` on, and return the rows of the step. taken: the sequences with tokens in it."""
        engine, rows = self._engine, self._rows
        idle = (seq for seq in range(self.width) if seq not in taken)
        for row, seq in zip(range(first, self.width), idle, strict=False):
            slot = self._slot + row
            engine.seq[row], engine.pos[row], engine.slot[row] = seq, self._ends(seq), slot
            engine.token[row], engine.query_row[row] = 0, -1
            engine.output[row] = 1  # the model's last layers compute only rows with an output
            if rows.owners[row] is not self:
                rows.owners[row] = self
                rows.data[row] = -float("inf")
                rows.data[row, slot] = 0
        return max(first, self.width)

    def clear(self, first: int) -> None:
        """Empty the slots of the rows from `first` on, after the step."""
        if first < self.width:
            self._engine.clear_cells(self._slot + first, self.width - first)


class Pool:
    """The pool of a context. It computes the steps of its texts, one or several in one step of the engine.

    Each sequence of the context has an equal share of the blocks, until `deal` changes the shares. So the residency of
    a text is a function of its own tokens and its sequence. share: tokens that a text with a request can have in the
    pool at least. texts: by sequence. decoding: texts of the newest step of answers.

    engine: on a context with a pool, closed with it. n_ubatch: most rows of one step. host_limit, spill: of the page
    images, see KVFlashConfig. block_order: the order in which blocks are handed out, for tests. stage_slots: tokens
    that a streamed step can see, its own included; 0 if none can be made. stage_bytes: device memory of the layer
    buffers. index_bytes: of index rows. device_states: recurrent state before draft rows. media: embeddings of the
    texts' images. fixed_rows: a step has at least a row for each sequence, see `Padding`, for which a block is set
    aside. beside: set once the next step is submitted, for what shall run beside it.
    """

    def __init__(
        self,
        engine: PagedEngine,
        *,
        n_ubatch: int,
        host_limit: int | None = None,
        spill: Path | None = None,
        block_order: Sequence[int] | None = None,
        fixed_rows: bool = False,
    ) -> None:
        info = engine.info
        self.engine = engine
        self.n_slots = info.n_slots
        self.n_ubatch = n_ubatch
        fixed_rows = fixed_rows and info.n_seq > 1
        blocks = (info.n_slots // CHUNK - (Padding.blocks(info.n_seq) if fixed_rows else 0)) // info.n_seq
        order = range(info.n_slots // CHUNK) if block_order is None else block_order
        self.shares = [BlockAllocator(blocks, order[i * blocks : (i + 1) * blocks]) for i in range(info.n_seq)]
        self._homes = [tuple(share.order) for share in self.shares]
        self.share = blocks * CHUNK
        self.texts: WeakValueDictionary[int, TextOnPool] = WeakValueDictionary()
        self.decoding = 1
        self.heap = PageHeap(engine, info.page_bytes, limit=host_limit, spill=spill)
        self.rows = MaskRows(info.n_slots, len(engine.token), f32=info.mask_f32)
        engine.use_mask(self.rows.data)
        self.padding = Padding(engine, self.rows, self._end) if fixed_rows else None
        self.device_states = DeviceStates(engine)
        self.media: MediaRows = MediaRows()
        self.stage_slots = 0
        self.stage_bytes = 0
        self.beside: list[Event] = []
        self.index_bytes = 0
        self._index_share = 0
        self.stage_mask = (AlibiStageMask if info.alibi else StageMask)(n_ubatch)

    def make_stages(self, slots: int) -> None:
        """Let steps see up to `slots` tokens, whatever is resident, as `PagedEngine.make_stages` does."""
        self.stage_bytes = self.engine.make_stages(slots, self.n_ubatch)
        self.stage_slots = slots

    def make_index(self, size: int) -> None:
        """Make room on a device for `size` bytes of index rows of each text, as `PagedEngine.open_index` does."""
        share = round_up(size, INDEX_STEP)
        self.index_bytes = self.engine.open_index(share * self.engine.info.n_seq)
        self._index_share = share

    def index_room(self, seq: int) -> Room:
        """Return where on the device index rows of a text go. It has no more if others have none."""
        return Room(seq * self._index_share, self._index_share)

    def make_mask(self) -> SlotMask:
        """Return the mask of one more text."""
        return (AlibiMask if self.engine.info.alibi else SlotMask)(self.rows)

    def join(self, text: TextOnPool, seq: int) -> None:
        """Add the text of a sequence. ConfigError if there is no such sequence, or it has a text."""
        if not 0 <= seq < len(self.shares):
            raise ConfigError(f"sequence {seq} of a context made for {len(self.shares)}: count from 0 on")
        if seq in self.texts:
            raise ConfigError(f"sequence {seq} has a text: close that first")
        self.texts[seq] = text

    def leave(self, seq: int) -> None:
        """Remove the closed text of a sequence. The last one closes the pool."""
        self.texts.pop(seq, None)
        if not self.texts:
            self.close()
        else:
            self.engine.clear(seq=seq)

    def deal(self, wanted: Mapping[int, int]) -> None:
        """Deal the blocks anew, between two steps. wanted: by sequence, the tokens that texts with a request can reach.

        These texts share the blocks that idle texts can give up, see `shares.sizes`. A text that gets more blocks fills
        them at its next reselection. No step may be prepared. If a text fails to evict chunks, all shares stay as they
        are.
        """
        for text in self.texts.values():
            text.give_up()  # its blocks can be another's next
        total = sum(map(len, self._homes))
        before = [share.order for share in self.shares]
        found = sizes([self._claim(seq, wanted) for seq in range(len(before))], total)
        for seq, text in self.texts.items():
            if len(text.table.held) > found[seq]:
                text.shrink(found[seq])
        after = dealt([self._claim(seq, wanted) for seq in range(len(before))], found, total)
        # in two passes, so that after an interrupt no block has two owners
        for share, old, new in zip(self.shares, before, after, strict=True):
            there = set(old)
            share.order = [block for block in new if block in there]
        for share, new in zip(self.shares, after, strict=True):
            share.order = new

    def _claim(self, seq: int, wanted: Mapping[int, int]) -> Claim:
        text, tokens = self.texts.get(seq), wanted.get(seq)
        return Claim(
            home=self._homes[seq],
            held=() if text is None else text.table.held,
            kept=0 if text is None else text.table.unevictable,
            wants=None if tokens is None else -(-tokens // CHUNK) + 1,
        )

    def run(self, steps: Sequence[Step]) -> None:
        """Compute prepared steps of different texts together, whose moves are made, and note the result in each.

        Their rows lie side by side, in this order. Logits of other texts are no longer available. Draft rows of other
        texts are settled if they could not roll back after the step, and a text that is not finite is given up. Nothing
        else steps the engine. Raises the errors of `PagedEngine.step`; then nothing of any step was computed.
        """
        others: list[TextOnPool] = []
        if len(steps) < len(self.texts):
            taken = [step.seq for step in steps]
            # every token of a user alone comes here, and `items` of this dictionary makes a dozen calls
            others = [text for ref in self.texts.valuerefs() if (text := ref()) is not None and text.seq not in taken]
            for text in others:
                if text.unchecked:
                    text.give_up()
        if self.engine.info.recurrent or self.engine.info.n_swa:
            self._settle(others)
        if steps[0].generated:
            self.decoding = len(steps)
        engine, end, wait, codes = self.engine, 0, 0, steps[0].codes
        for step in steps:
            first, start, n = end, step.start, len(step.tokens)
            end += n
            step.first, step.codes = first, codes  # one list: the engine notes the result for all at once
            if step.wait > wait:
                wait = step.wait
            if n == 1 and step.branches is None and step.streamed is None and step.tokens[0] >= 0:
                # Every decoded token comes here. Numpy takes three times as long for a slice of length one.
                engine.seq[first], engine.token[first], engine.pos[first] = step.seq, step.tokens[0], start
                engine.output[first] = step.output.every or step.output.last
                queries = step.queries
                engine.query_row[first] = queries.order.item(start % queries.ring) if queries.rows else -1
                engine.slot[first] = slot = step.plan.layout.slot_of(start)
                step.mask.fill_token(start, slot, first)
            else:
                self._write(step)
        for text in others:
            text.logits = NO_LOGITS
        media = self._media(steps[0]) if engine.token[0] < 0 else None
        if engine.places:
            for step in steps:
                self._place(step)
        if media is not None or self.padding is None or steps[0].streamed is not None or steps[0].branches is not None:
            engine.step(end, wait, codes, steps[0].streamed, media)
        else:
            try:
                engine.step(self.padding.fill(end, {step.seq for step in steps}), wait, codes)
            finally:
                self.padding.clear(end)
        while self.beside:
            self.beside.pop().set()

    def _write(self, step: Step) -> None:
        """Write the rows of a step that has several tokens, a tree or media, or streams."""
        engine, first, start, n, branches = self.engine, step.first, step.start, len(step.tokens), step.branches
        end = first + n
        engine.seq[first:end] = step.seq
        engine.token[first:end] = step.tokens
        engine.output[first:end] = step.output.every
        engine.output[end - 1] = step.output.every or step.output.last
        layout, slots = step.plan.layout, engine.slot[first:end]
        if branches is None:
            engine.pos[first:end] = np.arange(start, start + n) if n > 1 else start
            if step.queries.rows:
                step.queries.capture(start, n, engine.query_row[first:end])
            layout.slots(start, slots)
            if step.streamed is None:
                step.mask.fill(start, slots, first)
                if step.tokens[0] < 0 and self.is_span(step.tokens):
                    step.mask.open_span(slots, first)
        else:
            engine.pos[first:end] = start + branches.depth
            if step.queries.rows:
                ring = step.queries
                engine.query_row[first:end] = ring.order[(start + branches.where) % ring.ring]
            slots[:] = [layout.slot_of(start + at) for at in branches.where.tolist()]
            step.mask.fill_tree(start, slots, branches.parent, first)
        if not step.queries.rows:
            engine.query_row[first:end] = -1

    def _settle(self, texts: Sequence[TextOnPool]) -> None:
        """Settle draft rows of texts that could not roll back after a step of others."""
        for text in texts:
            if text.draft_rows is not None and text.draft_rows.state is None:
                text.settle()  # the step may overwrite the state that it rolls back to

    def is_span(self, tokens: Int32s) -> bool:
        """Return whether the rows of a step, of tokens or of media, see each other in the pool."""
        return are_mutual(tokens) and not self.engine.info.windows_mutual

    def _media(self, step: Step) -> Part:
        """Return the embeddings of a step of media."""
        ids, start = self.texts[step.seq].ids, step.start
        if self.engine.info.n_pos > 1 and step.seq not in self.engine.places:
            self._note(step.seq, ids[:start], len(ids))
        return self.media.rows(ids[max(0, start - 1) : start], step.tokens)

    def place(self, seq: int, ids: Int32s, max_rows: int) -> None:
        """Note the positions of a text's rows `ids`, of `max_rows` that it can have."""
        self.engine.places.pop(seq, None)
        if self.engine.info.n_pos > 1 and (ids < 0).any():
            self._note(seq, ids, max_rows)

    def _note(self, seq: int, ids: Int32s, max_rows: int) -> None:
        room = max_rows + len(self.engine.token)  # draft rows can end beyond it
        places = np.arange(room + 1, dtype=np.int32)
        np.cumsum(advances_of(ids), out=places[1 : len(ids) + 1])
        self.engine.places[seq] = places

    def _place(self, step: Step) -> None:
        """Put the rows of a step at their positions. Positions behind them belong to no row yet."""
        places, start, n = self.engine.places.get(step.seq), step.start, len(step.tokens)
        if places is None:
            return
        behind = np.cumsum(advances_of(step.tokens)) if step.tokens[0] < 0 else np.arange(1, n + 1)
        places[start + 1 : start + n + 1] = places[start] + behind
        here = places[start : start + n] if step.branches is None else places[start] + step.branches.depth
        self.engine.pos[step.first : step.first + n] = here

    def _end(self, seq: int) -> int:
        """Return the position behind everything that a sequence has in memory."""
        text = self.texts.get(seq)
        if text is None:
            return 0
        rows = text.table.layout.length if text.draft_rows is None else text.draft_rows.end
        return self.engine.end(rows, seq=seq)

    def close(self) -> None:
        self.heap.close()
        self.engine.close()
