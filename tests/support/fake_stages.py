"""What a streamed step has to be, from the bytes that the fake engine holds rather than from the session's books."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvflash_ggml.constants import CHUNK, POOL_STEP, round_up
from kvflash_ggml.native.streamed import Streamed

if TYPE_CHECKING:
    from support.fake_engine import FakeEngine

Positions = npt.NDArray[np.int64]


@dataclass
class FakeStages:
    """views: the chunks that each streamed step has seen. refuse: raised instead of making stages."""

    slots: int = 0
    bytes: int = 0
    ticket: int = 0
    views: list[tuple[int, ...]] = field(default_factory=list)
    refuse: Exception | None = None

    def make(self, slots: int, max_tokens: int) -> int:
        assert slots > 0
        assert slots % POOL_STEP == 0
        assert slots >= max_tokens
        if self.refuse is not None:
            raise self.refuse
        self.slots = slots
        return slots

    def check(
        self, engine: FakeEngine, start: int, count: int, streamed: Streamed, *, mutual: bool
    ) -> dict[int, bytes]:
        """The images that the step reads, with what they have to hold then. mutual: its rows see each other."""
        images = [int(image) for image in streamed.images]
        assert images, "a streamed step without images is a pooled one"
        assert start % CHUNK == streamed.rows, "the open chunk is not seen as far as it goes"
        total = len(images) * CHUNK + streamed.rows + count
        assert total <= self.slots, "more than the stages hold"
        image = engine.settled()[1]
        chunk_of = {b"".join(engine.truth[lo : lo + CHUNK]): lo // CHUNK for lo in range(0, start, CHUNK)}
        data = {each: image(each) for each in images}
        assert all(each in chunk_of for each in data.values()), "an image is of no chunk of the text"
        chunks = tuple(chunk_of[data[each]] for each in images)
        assert list(chunks) == sorted(set(chunks)), "chunks out of order"
        assert all(c < start // CHUNK for c in chunks)
        past = [c * CHUNK + i for c in chunks for i in range(CHUNK)]
        position = np.array([*past, *range(start - streamed.rows, start + count)])
        self._check_mask(engine, start, count, streamed, position, mutual=mutual)
        self.views.append(chunks)
        return data

    def _check_mask(
        self,
        engine: FakeEngine,
        start: int,
        count: int,
        streamed: Streamed,
        position: Positions,
        *,
        mutual: bool,
    ) -> None:
        """The one rule: shown is what is at or before a token's position. mutual: or of the step."""
        mask, first = streamed.mask, streamed.first
        assert mask.dtype == np.float16
        assert mask.flags.c_contiguous
        assert mask.shape[0] >= count
        assert first in (0, len(streamed.images) * CHUNK)
        assert mask.shape[1] >= round_up(len(position), POOL_STEP) - first, "rows of the stage have no column"
        distance = np.arange(start, start + count)[:, None] - position
        if mutual:
            distance[:, -count:] = 0
        assert (distance[:, :first] > 0).all(), "what the mask leaves out has to be visible"
        if engine.info.alibi:
            assert first == 0, "a distance is left out"
        want = np.full((count, mask.shape[1]), -np.inf, np.float16)
        shown = -distance * int(engine.info.alibi)
        want[:, : len(position) - first] = np.where(distance < 0, -np.inf, shown)[:, first:]
        np.testing.assert_array_equal(mask[:count], want)
        engine.seen = (distance >= 0).sum(axis=1).tolist()

    def read(self, data: dict[int, bytes], bytes_at: Callable[[int], bytes]) -> None:
        """The device reads the images: as late as when somebody waits for it."""
        for image, want in data.items():
            assert bytes_at(image) == want, "an image was taken away before it was read"
            self.bytes += len(want)
