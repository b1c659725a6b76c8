"""Moves page images between the pool and the host, as the page table says."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..arrays import Int32s
from ..constants import CHUNK
from ..host.image import PageImage
from ..host.store import HostStore
from ..native.streamed import MassRequest, Streamed
from ..pool.masks import SlotMask, StageMask, View
from ..pool.page_table import PageTable
from ..pool.plan import ABSENT, Layout, Moves

if TYPE_CHECKING:
    from ..native.engine import PagedEngine

logger = logging.getLogger("kvflash_ggml")


class Paging:
    """Makes the moves of a page table on an engine.

    ids: the tokens of the text, [n_ctx]. sealed: called with chunks whose images are in `store`, before the host counts
    as having them; called again if that was interrupted. saved: the number of sealed chunks when all of them were last
    on the host.
    """

    def __init__(
        self,
        engine: PagedEngine,
        seq: int,
        table: PageTable,
        mask: SlotMask,
        store: HostStore,
        ids: Int32s,
        sealed: Callable[[Sequence[int]], None],
    ) -> None:
        self._image_users: set[int] = set()
        self.heap = store.heap
        self.store = store
        self.page_ins = 0
        self.page_outs = 0
        self.saved = 0
        self._engine = engine
        self._seq = seq
        self._table = table
        self._mask = mask
        self._ids = ids
        self._sealed = sealed

    @property
    def keeps_images(self) -> bool:
        """Whether images of resident chunks stay, once made. A bounded pool evicts by them; another pool saves them
        anew.
        """
        return self._table.bounded or bool(self._image_users)

    def keep_images_for(self, user: object) -> None:
        """Keep the images of resident chunks for a user."""
        self._image_users.add(id(user))

    def no_images_for(self, user: object) -> None:
        """End `keep_images_for`. It may be called twice."""
        self._image_users.discard(id(user))

    def apply(self, moves: Moves, length: int) -> int:
        """Make the moves of a plan, for a text of `length` tokens. After an interrupt it can be repeated or undone.

        Returns the transfer that frees the blocks: nothing may be written to them before it is done.
        """
        wait = 0
        for chunk, block in moves.evict:
            self._hide(block)
            wait = max(wait, self.store.ticket(chunk))
        if moves.recall:
            self._fill(moves.recall, length)
            self.page_ins += len(moves.recall)
        for chunk, block in moves.fresh:
            self._mask.place(block, chunk)
        return wait

    def undo(self, moves: Moves) -> None:
        """Bring the blocks that a step's moves touched, or may have touched, back to what the page table says.

        A chunk whose bytes are lost on the device stays on the host only.
        """
        self._engine.synchronize()  # an interrupt may have lost the ticket of a transfer
        touched = moves.blocks
        for block in touched:
            self._hide(block)
        for c, chunk in enumerate(self._table.chunks):
            if chunk.block in touched:
                try:
                    self._fill([(c, chunk.block)], self._table.length)
                except Exception as err:
                    logger.warning("chunk %d stays on the host: %s", c, err)
                    self._hide(chunk.block)
                    self._table.strand(c)

    def _hide(self, block: int) -> None:
        """Hide the block from all queries."""
        self._engine.clear_cells(block * CHUNK, CHUNK)
        self._mask.clear(block)

    # --- out

    def save_sealed(self) -> None:
        """Copy newly sealed chunks of a bounded pool to the host, behind the compute."""
        if self._table.bounded and self._table.layout.length // CHUNK != self.saved:
            self.save()

    def save(self) -> None:
        """Copy sealed chunks to the host, behind the compute."""
        unsaved = self._table.unsaved
        for chunks in self.heap.fitting(unsaved):
            self._save(chunks)
        self.saved = unsaved.stop

    def _save(self, chunks: Sequence[int]) -> None:
        for chunk in chunks:
            self.store.drop(chunk)  # an interrupt may have left an unfilled image
        with self.store.allocate(chunks) as images, self._known_transfers():
            ticket = self._engine.page_out([self._table.chunks[chunk].block for chunk in chunks], images)
            self.store.in_use(chunks, ticket)
        self._sealed(chunks)
        self.page_outs += len(chunks)
        self.store.filled(chunks, ticket)

    def retain(self, length: int) -> list[PageImage]:
        """Return one image per chunk of the first `length` tokens, each retained for the caller.

        Images on the host are shared. The rest are copied, which waits for the compute. HostMemoryError, and nothing
        retained, if there is no memory for them.
        """
        pages: list[PageImage] = []
        try:
            for c in range(-(-length // CHUNK)):
                pages.append(self._retain(c, min(CHUNK, length - c * CHUNK)))
        except BaseException:
            for page in pages:
                self.heap.release(page)
            raise
        return pages

    def retain_kept(self, length: int) -> list[PageImage]:
        """Return the same for a text whose chunks are all on the host. It asks no device."""
        whole, rows = divmod(length, CHUNK)
        pages = [self.heap.retain(self.store.page(chunk)) for chunk in range(whole)]
        if rows:
            (page,) = self.heap.new(1)
            pages.append(page)
            with self.heap.lease([page]):
                self.heap.view(page)[:] = self.store.bytes_of(whole)
                self._engine.blank(self.heap.view(page), rows)
        return pages

    def _retain(self, chunk: int, rows: int) -> PageImage:
        """Return the image of the first rows of a chunk, retained."""
        if rows == CHUNK and chunk in self.store:
            return self.heap.retain(self.store.page(chunk))
        (page,) = self.heap.new(1)
        block = self._table.chunks[chunk].block
        try:
            with self.heap.lease([page]) as images, self._known_transfers():
                if block != ABSENT:
                    page.ticket = page.filled = self._engine.page_out([block], images)
                else:
                    self.heap.view(page)[:] = self.store.bytes_of(chunk)
                if rows < CHUNK:
                    self._engine.wait(page.ticket)
                    self._engine.blank(self.heap.view(page), rows)
        except BaseException:
            self.heap.release(page)
            raise
        if self.keeps_images and chunk < self._table.length // CHUNK and rows == CHUNK:
            self.store.drop(chunk)
            self.store.put(chunk, page)
        return page

    # --- in

    def load(self, pages: Sequence[PageImage], length: int) -> None:
        """Fill the blocks of a loaded table from images. Keep the images that evictions need, or that are the only
        copy.
        """
        for c, page in enumerate(pages):
            self.store.put(c, page)
        self._fill([(c, chunk.block) for c, chunk in enumerate(self._table.chunks) if chunk.block >= 0], length)
        for c, chunk in enumerate(self._table.chunks):
            if chunk.block != ABSENT and not (self.keeps_images and c < length // CHUNK):
                self.store.drop(c)

    def empty(self) -> None:
        """Clear all slots of the text. Recurrent state and windows stay."""
        self._engine.synchronize()
        for block in self._table.blocks.order:
            self._engine.clear_cells(block * CHUNK, CHUNK)

    def clear(self) -> None:
        self.store.clear()

    def _fill(self, pages: Sequence[tuple[int, int]], length: int) -> None:
        """Copy page images into their blocks, ahead of the next compute."""
        while pages:
            with self.store.lease_some([chunk for chunk, _ in pages]) as images, self._known_transfers():
                group, pages = pages[: len(images)], pages[len(images) :]
                ticket = self._engine.page_in([block for _, block in group], images)
                self.store.in_use([chunk for chunk, _ in group], ticket)  # the image must outlive the transfer
            for chunk, block in group:
                lo = chunk * CHUNK
                self._engine.set_cells(block * CHUNK, lo, self._ids[lo : min(lo + CHUNK, length)], seq=self._seq)
                self._mask.place(block, chunk)

    @contextmanager
    def streamed(
        self,
        view: View,
        layout: Layout,
        mask: StageMask,
        start: int,
        count: int,
        wanted: MassRequest,
        *,
        mutual: bool = False,
    ) -> Iterator[Streamed]:
        """Lease the images that a step of `count` tokens at `start` sees, and yield the engine's description of the
        step.

        mutual: the tokens see each other.
        """
        block = layout.chunks[start // CHUNK].block if view.rows else 0
        rows, first = mask.fill(start, count, view, mutual=mutual)
        with self.store.lease(view.chunks) as images, self._known_transfers():
            yield Streamed(images, view.rows, block, rows, first, wanted)
            self.store.in_use(view.chunks, self._engine.streamed_ticket)

    @contextmanager
    def _known_transfers(self) -> Iterator[None]:
        """Guard transfers of a lease, whose memory may be reused when it ends: a ticket says when they are done.

        If an exception loses the ticket, this waits for all transfers.
        """
        try:
            yield
        except BaseException:
            self._engine.synchronize()
            raise
