"""What texts share: one engine with its blocks, the page images off the device, and room for mask rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..constants import CHUNK
from ..host.heap import PageHeap
from ..pool.masks import AlibiMask, AlibiStageMask, MaskRows, SlotMask, StageMask
from ..pool.page_table import BlockAllocator
from .device_states import DeviceStates

if TYPE_CHECKING:
    from ..native.engine import Engine
    from .step import Step


class Pool:
    """The pool of a context. It holds no text; it computes the steps of those that know it.

    engine: on a context with a pool, closed with it. n_ubatch: rows of one step at most. host_limit, spill: of the page
    images, see KVFlashConfig. block_order: in which blocks are handed out, for tests. stage_slots: tokens that a
    streamed step can see, its own with them; 0 if none can be made. stage_bytes: what that takes on the devices.
    device_states: where what is not pooled is kept in front of draft rows. beside: another pool of the same model and
    devices, whose images this one's texts can have; `take_images` makes them its own. owns_images: closes them with
    itself.
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

    def run(self, step: Step) -> None:
        """Compute a prepared step, whose moves are made, and note the result in its `codes`.

        Nothing else steps the engine. Raises what `Engine.step` raises.
        """
        engine, start, n, branches = self.engine, step.start, len(step.tokens), step.branches
        engine.token[:n] = step.tokens
        engine.output[:n] = step.output.every
        engine.output[n - 1] = step.output.every or step.output.last
        layout, slots = step.plan.layout, engine.slot[:n]
        if branches is None:
            engine.pos[:n] = np.arange(start, start + n) if n > 1 else start
            if step.queries.rows:
                step.queries.capture(start, n)
            layout.slots(start, slots)
            if step.streamed is None:
                step.mask.fill(start, slots)
        else:
            engine.pos[:n] = start + branches.depth
            if step.queries.rows:
                step.queries.capture_at(start + branches.where)
            slots[:] = [layout.slot_of(start + at) for at in branches.where.tolist()]
            step.mask.fill_tree(start, slots, branches.parent)
        engine.step(n, step.wait, step.codes, step.streamed)

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
