"""What texts share: one engine with its blocks, the page images off the device, and room for mask rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..constants import CHUNK
from ..host.heap import PageHeap
from ..pool.allocator import BlockAllocator
from ..pool.masks import AlibiMask, MaskRows, SlotMask
from ..pool.view import AlibiStageMask, StageMask
from .device_states import DeviceStates

if TYPE_CHECKING:
    from ..native.engine import Engine


class Pool:
    """The pool of a context. It knows no text; a text knows its pool.

    engine: on a context with a pool, closed with it. n_ubatch: rows of one step at most. host_limit, spill: of the page
    images, see KVFlashConfig. block_order: in which blocks are handed out, for tests. stage_slots: tokens that a
    streamed step can see, its own with them; 0 if none can be made. stage_bytes: what that takes on the devices.
    stash: where what is not pooled is kept in front of drafts. beside: another pool of the same model and devices,
    whose images this one's texts can have; `take_images` makes them its own. owns_images: closes them with itself.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        n_ubatch: int,
        host_limit: int | None = None,
        spill: Path | None = None,
        block_order: Sequence[int] | None = None,
        beside: Pool | None = None,
    ) -> None:
        info = engine.info
        self.engine = engine
        self.n_slots = info.n_slots
        self.n_ubatch = n_ubatch
        self.blocks = BlockAllocator(info.n_slots // CHUNK, block_order)
        self.owns_images = beside is None
        self.heap: PageHeap = (
            PageHeap(engine, info.page_bytes, limit=host_limit, spill=spill) if beside is None else beside.heap
        )
        self.rows = MaskRows(info.n_slots, len(engine.token), f32=info.mask_f32)
        engine.use_mask(self.rows.data)
        self.device_states = DeviceStates(engine)
        self.stage_slots = 0
        self.stage_bytes = 0
        self.stage_mask = (AlibiStageMask if info.alibi else StageMask)(n_ubatch)

    def make_stages(self, slots: int) -> None:
        """Let steps see up to `slots` tokens, their own with them, whatever is resident. See `Engine.make_stages`."""
        self.stage_bytes = self.engine.make_stages(slots, self.n_ubatch)
        self.stage_slots = slots

    def make_mask(self) -> SlotMask:
        """What one more text sees."""
        return (AlibiMask if self.engine.info.alibi else SlotMask)(self.rows)

    def take_images(self, other: Pool) -> None:
        """The images that both have are this pool's from now on; it closes them, and the other no longer does.

        After an interrupt `owns_images` says so though they may have stayed: the other has to take them back.
        """
        self.owns_images, other.owns_images = True, False
        self.heap.move(self.engine, partial(self.engine.adopt_host, other.engine))

    def close(self) -> None:
        if self.owns_images:
            self.heap.close()
        self.engine.close()
