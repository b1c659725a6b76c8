"""An engine without a device: a pool of numpy bytes, as nasty as the native one may be.

Transfers are queued. They happen when somebody waits for them, and otherwise as late (`lazy`), as
early, or as randomly as the contract of the native seam permits, so that a missing wait shows as
wrong bytes.
"""

from __future__ import annotations

import random
import threading
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvflash_ggml.config import KVFlashConfig
from kvflash_ggml.constants import CHUNK
from kvflash_ggml.errors import CLOSED, DecodeError, HostMemoryError, KVFlashError, NotFinite, SnapshotError
from kvflash_ggml.media.rows import Part, are_mutual
from kvflash_ggml.native.streamed import Streamed
from kvflash_ggml.policy.base import Scorer
from kvflash_ggml.sequence.pool import Pool
from kvflash_ggml.sequence.reading import POOL, Reading
from kvflash_ggml.sequence.sequence import Sequence
from support.fake_host import Bytes, FakeHost
from support.fake_stages import FakeStages

Int32s = npt.NDArray[np.int32]

ROW_BYTES = 8
PAGE_BYTES = CHUNK * ROW_BYTES


@dataclass(frozen=True)
class FakeLayer:
    il: int = 0
    k_row: int = ROW_BYTES
    v_row: int = 0
    n_head: int = 1
    n_head_kv: int = 1
    head_k: int = ROW_BYTES
    head_v: int = ROW_BYTES
    device: int = 0
    scale: float = 1.0


@dataclass(frozen=True)
class FakeDevice:
    name: str = "CPU"
    mode: str = "host"
    largest_bytes: int = 0

    @property
    def overlaps(self) -> bool:
        return self.mode in ("stream", "remote")


@dataclass(frozen=True)
class FakeInfo:
    n_slots: int
    n_seq: int = 1
    n_pos: int = 1
    n_swa: int = 0
    recurrent: bool = False
    windows_mutual: bool = False
    alibi: bool = False
    mask_f32: bool = False
    v_trans: bool = False
    query_rows: int = 0
    rs_planes: int = 0
    asynchronous: bool = False
    host_compute: bool = False
    n_threads: int = 1
    rotated: int = 0
    page_bytes: int = PAGE_BYTES
    step_work: int = 0
    type_k: str = "f16"
    type_v: str = "f16"
    devices: tuple[FakeDevice, ...] = (FakeDevice(),)


@dataclass(slots=True)
class Transfer:
    """read: of a streamed step, which reads images and writes nothing, and of a state, which is sent to the host."""

    ticket: int
    out: bool
    pairs: list[tuple[int, int]]
    read: Callable[[], None] | None = None


@dataclass
class Faults:
    """step: steps until one fails. late: interrupted after its compute. spoil: recurrent state is lost. full: the
    device has no room to keep a state.
    """

    step: int | None = None
    error: Callable[[], BaseException] = field(default=lambda: DecodeError("llama_decode returned 2"))
    late: bool = False
    spoil: bool = False
    full: bool = False


class FakeEngine(FakeHost):
    """`truths[seq][pos]` is the row that was computed for a position, `truth` that of sequence 0.

    seen: how much each token of the last step has seen. spoiled: sequences whose logits are not finite.
    """

    is_lost = False

    def __init__(
        self,
        n_slots: int,
        max_tokens: int,
        *,
        timing: Literal["lazy", "eager", "random"] = "lazy",
        seed: int = 0,
        **info: Any,
    ) -> None:
        super().__init__()
        self.info = FakeInfo(n_slots=n_slots, **info)
        self.layers = (FakeLayer(),)
        self.token = np.zeros(max_tokens, np.int32)
        self.pos = np.zeros(max_tokens, np.int32)
        self.slot = np.zeros(max_tokens, np.int32)
        self.seq = np.zeros(max_tokens, np.int32)
        self.query_row = np.full(max_tokens, -1, np.int32)
        self.output = np.zeros(max_tokens, np.int8)
        self.faults = Faults()
        self.stages = FakeStages()
        self.seen: list[int] = []
        self.truths: list[list[bytes]] = [[] for _ in range(self.info.n_seq)]
        self.texts: list[list[int]] = [[] for _ in range(self.info.n_seq)]
        self.truth, self.tokens = self.truths[0], self.texts[0]
        self.spoiled: set[int] = set()
        self.steps: list[int] = []
        self.outputs: list[list[int]] = []
        self.rows: list[bytes] = []  # mask rows of each step
        self.closed = False
        self.pool = np.zeros((n_slots, ROW_BYTES), np.uint8)
        self.cell_pos = np.full(n_slots, -1, np.int32)
        self.cell_seq = np.zeros(n_slots, np.int32)
        self.cell_token = np.zeros(n_slots, np.int32)
        self._max_tokens = max_tokens
        self._timing = timing
        self._random = random.Random(seed)
        self._queue: list[Transfer] = []
        self._queue_lock = threading.RLock()  # a scoring thread waits for transfers too
        self._ticket = 0
        self._last_page_in = 0
        self._serial = 0
        self.places: dict[int, Int32s] = {}
        self.queries = np.zeros((self.info.query_rows, ROW_BYTES), np.float32)
        # tokens that the recurrent state or the window has seen; None: lost
        self._state: list[int] | None = []
        self._kept: bytes | None = None
        self._window_first = 0

    # --- steps

    def use_mask(self, rows: npt.NDArray[np.floating]) -> None:
        assert rows.shape == (self._max_tokens, self.info.n_slots)
        assert rows.dtype == (np.float32 if self.info.mask_f32 else np.float16)
        self._mask = rows

    def fix_view(self) -> None:
        pass

    def make_stages(self, slots: int, tokens: int) -> int:
        return self.stages.make(slots, tokens)

    @property
    def streamed_ticket(self) -> int:
        return self.stages.ticket

    @property
    def streamed_bytes(self) -> int:
        return self.stages.bytes

    def step(
        self, count: int, wait: int, codes: list[int], streamed: Streamed | None = None, media: Part | None = None
    ) -> None:
        start = len(self.truth)
        assert not codes
        slots, rows = self.slot[:count], self.token[:count] < 0
        assert 0 < count <= self._max_tokens
        assert rows.all() if media is not None else not rows.any(), "tokens and media in one step"
        assert media is None or len(media.rows) == count
        follows = [len(truth) for truth in self.truths]
        for seq, pos in zip(self.seq[:count].tolist(), self.pos[:count].tolist(), strict=True):
            assert pos == follows[seq], "positions have a gap"
            follows[seq] += 1
        assert len(set(slots.tolist())) == count
        assert 0 <= slots.min() <= slots.max() < self.info.n_slots
        assert (self.cell_pos[slots] == -1).all(), "a planned slot is taken"
        for seq in set(self.seq[:count].tolist()):
            held = self.cell_pos[self.cell_seq == seq].max(initial=-1)
            assert held == len(self.truths[seq]) - 1, "positions do not follow the last one in memory"
        images: dict[int, bytes] = {}
        mutual = are_mutual(self.token[:count])
        if streamed is None:
            self._check_mask(count, mutual=mutual)
        else:
            images = self.stages.check(self, start, count, streamed, mutual=mutual)
        self._check_state(start)
        fault = self._fault()
        failed = isinstance(fault, DecodeError)
        if fault is not None and not failed and not self.faults.late:
            raise fault
        self._capture(count)  # even by a step that fails
        if fault is not None and failed:
            codes.append(2)
            if streamed is not None:
                self.synchronize()
            if self.faults.spoil and self.info.recurrent:
                self._state = None
            raise fault
        self._run_up_to(max(wait, self._last_page_in))
        self._last_page_in = 0
        if streamed is not None:
            self._stream(start, streamed, images)
        for seq, slot, token in zip(
            self.seq[:count].tolist(), slots.tolist(), self.token[:count].tolist(), strict=True
        ):
            self._serial += 1
            row = b"".join(x.to_bytes(4, "little") for x in (token & 0xFFFFFFFF, self._serial))
            self.pool[slot] = np.frombuffer(row, np.uint8)
            self.cell_pos[slot] = len(self.truths[seq])
            self.cell_seq[slot] = seq
            self.cell_token[slot] = token
            self.truths[seq].append(row)
            self.texts[seq].append(token)
            if self._state is not None:
                self._state.append(token)
        self._window_first = max(self._window_first, len(self.truth) - self.info.n_swa - self._max_tokens)
        self.steps.append(count)
        self.outputs.append(self.output[:count].tolist())
        self.rows.append(self._mask[:count].tobytes())
        codes.append(0)
        if fault is not None:
            raise fault

    def _stream(self, start: int, streamed: Streamed, images: dict[int, bytes]) -> None:
        base, first = streamed.block * CHUNK, start - streamed.rows
        rows = self.pool[base : base + streamed.rows].tobytes()
        assert rows == b"".join(self.truth[first:start]), "the open chunk is elsewhere"
        with self._queue_lock:
            self._ticket += 1
            self.stages.ticket = self._ticket
            read = partial(self.stages.read, images, lambda image: self.bytes_at(image, PAGE_BYTES).tobytes())
            self._queue.append(Transfer(self._ticket, False, [], read))
            self._drift()

    def _capture(self, count: int) -> None:
        rows = self.query_row[:count].tolist()
        named = [row for row in rows if row != -1]
        assert len(set(named)) == len(named), "two queries for one row"
        assert all(0 <= row < self.info.query_rows for row in named)
        for pos, token, row in zip(self.pos[:count].tolist(), self.token[:count].tolist(), rows, strict=True):
            if row != -1:
                self.queries[row] = np.sin(np.arange(1, ROW_BYTES + 1) * (token + 7 * pos))

    def _fault(self) -> BaseException | None:
        if self.faults.step is None:
            return None
        self.faults.step -= 1
        if self.faults.step >= 0:
            return None
        self.faults.step = None
        return self.faults.error()

    def _check_mask(self, count: int, *, mutual: bool) -> None:
        """The one rule, from the cells rather than from the page table: of its own sequence, what is not later.

        mutual: the rows of the step see each other, too.
        """
        cells, seqs = self.cell_pos.copy(), self.cell_seq.copy()
        cells[self.slot[:count]], seqs[self.slot[:count]] = self.pos[:count], self.seq[:count]
        distance = self.pos[:count, None] - cells
        shown = np.where(self.info.alibi, -distance, 0)
        seen = (cells >= 0) & (distance >= 0) & (seqs == self.seq[:count, None])
        seen[:, self.slot[:count]] |= mutual
        want = np.where(seen, shown, -np.inf).astype(self._mask.dtype)
        if not np.array_equal(self._mask[:count], want):  # what says where takes longer than the step
            np.testing.assert_array_equal(self._mask[:count], want)
        self.seen = seen.sum(axis=1).tolist()

    def argmax(self, rows: abc.Sequence[int]) -> Int32s:
        if self.spoiled.intersection(self.seq[list(rows)].tolist()):
            raise NotFinite("the logits of a row are not finite")
        return np.array(self.seen, np.int32)[list(rows)]

    def _check_state(self, start: int) -> None:
        if self.info.recurrent or self.info.n_swa:
            assert self._state == self.tokens, "the state belongs to another text"
        if self.info.n_swa:
            assert self._window_first <= max(0, start - self.info.n_swa), "the window has a hole"

    def synchronize(self) -> None:
        self._run_up_to(self._ticket)

    # --- transfers

    def page_out(self, blocks: abc.Sequence[int], images: abc.Sequence[int]) -> int:
        return self._transfer(True, blocks, images)

    def page_in(self, blocks: abc.Sequence[int], images: abc.Sequence[int]) -> int:
        self._last_page_in = self._transfer(False, blocks, images)
        return self._last_page_in

    def _transfer(self, out: bool, blocks: abc.Sequence[int], images: abc.Sequence[int]) -> int:
        assert not self.info.v_trans
        assert len(blocks) == len(images) > 0
        assert len(set(images)) == len(images), "two blocks for one image"
        for block, image in zip(blocks, images, strict=True):
            assert 0 <= block < self.info.n_slots // CHUNK
            self.bytes_at(image, PAGE_BYTES)
        with self._queue_lock:
            self._ticket += 1
            self._queue.append(Transfer(self._ticket, out, list(zip(blocks, images, strict=True))))
            self._drift()
            return self._ticket

    def wait(self, ticket: int) -> None:
        super().wait(ticket)
        self._run_up_to(ticket)

    def is_sound(self, ticket: int) -> bool:
        return True

    def check_lost(self) -> None:
        """No server computes for it."""

    def _drift(self) -> None:
        """What the device does while nobody waits."""
        if self._timing == "eager":
            self._run_up_to(self._ticket)
        elif self._timing == "random" and self._queue:
            self._run_up_to(self._random.choice(self._queue).ticket)

    def _run_up_to(self, ticket: int) -> None:
        with self._queue_lock:
            while self._queue and self._queue[0].ticket <= ticket:
                transfer = self._queue.pop(0)
                if transfer.read is not None:
                    transfer.read()
                for block, image in transfer.pairs:
                    rows = self.pool[block * CHUNK : (block + 1) * CHUNK].reshape(-1)
                    data = self.bytes_at(image, PAGE_BYTES)
                    if transfer.out:
                        data[:] = rows
                    else:
                        rows[:] = data

    def settled(self) -> tuple[Bytes, Callable[[int], bytes]]:
        """(pool, reader of images) as they will be once the queue is empty. Changes nothing."""
        images: dict[int, bytes] = {}
        with self._queue_lock:  # a scoring thread that waits would take transfers away under the loop
            pool = self.pool.copy()
            for transfer in self._queue:
                for block, image in transfer.pairs:
                    rows = pool[block * CHUNK : (block + 1) * CHUNK].reshape(-1)
                    if transfer.out:
                        images[image] = rows.tobytes()
                    else:
                        data = images.get(image) or self.bytes_at(image, PAGE_BYTES).tobytes()
                        rows[:] = np.frombuffer(data, np.uint8)
        return pool, lambda image: images.get(image) or self.bytes_at(image, PAGE_BYTES).tobytes()

    def blank(self, image: memoryview, first: int) -> None:
        image[first * ROW_BYTES :] = bytes((CHUNK - first) * ROW_BYTES)

    # --- scoring

    @property
    def query_shapes(self) -> abc.Sequence[tuple[int, int, int]]:
        return [(self.info.query_rows, 1, ROW_BYTES)] if self.info.query_rows else []

    def read_queries(self, out: npt.NDArray[np.float32], rows: Int32s | None = None) -> int:
        if rows is None:
            out[:] = self.queries.reshape(-1)
        else:
            out[:] = np.nan
            out.reshape(self.queries.shape)[rows] = self.queries[rows]
        return 0

    def write_queries(self, rows: npt.NDArray[np.float32]) -> None:
        self.queries.reshape(-1)[:] = rows

    def keys(self, page: Bytes) -> list[npt.NDArray[np.float32]]:
        return [page.reshape(CHUNK, 1, ROW_BYTES).astype(np.float32)]

    # --- cells

    def clear_cells(self, slot: int, count: int) -> None:
        assert 0 <= slot <= slot + count <= self.info.n_slots
        self.cell_pos[slot : slot + count] = -1

    def zero_unused(self) -> None:
        self.synchronize()
        self.pool[self.cell_pos < 0] = 0

    def set_cells(self, slot: int, pos: int, tokens: Int32s, *, seq: int) -> None:
        self.clear_cells(slot, len(tokens))
        self.cell_seq[slot : slot + len(tokens)] = seq
        self.cell_pos[slot : slot + len(tokens)] = np.arange(pos, pos + len(tokens))
        self.cell_token[slot : slot + len(tokens)] = tokens

    def end(self, rows: int, *, seq: int) -> int:
        return rows

    def whole(self, row: int, *, seq: int) -> int:
        return row

    def can_truncate(self, pos: int, *, seq: int) -> bool:
        return not self.info.recurrent or pos == 0

    def truncate(self, pos: int, *, seq: int) -> bool:
        assert pos >= 0
        if self.info.recurrent and pos != 0 and (self._state is None or pos < len(self._state)):
            return False
        self.cell_pos[(self.cell_pos >= pos) & (self.cell_seq == seq)] = -1
        self._cut(pos, seq)
        self._state = (self._state or [])[:pos]
        if pos == 0:
            self._window_first = 0
        return True

    def clear(self, *, seq: int) -> None:
        self.synchronize()
        self.cell_pos[self.cell_seq == seq] = -1
        if self.info.n_seq == 1:
            self.cell_pos[:] = -1
            self.pool[:] = 0
        self._cut(0, seq)
        self._state, self._window_first = [], 0

    def _cut(self, pos: int, seq: int) -> None:
        del self.truths[seq][pos:]
        del self.texts[seq][pos:]

    def window_start(self, *, seq: int) -> int:
        return self._window_first if self.info.n_swa else -1

    # --- state

    def get_state(self, *, seq: int) -> bytes:
        assert seq == 0
        if not (self.info.recurrent or self.info.n_swa):
            return b""
        if self._state is None:
            raise SnapshotError("llama.cpp could not write the recurrent state")
        return np.array([len(self._state), self._window_first, *self._state], "<i4").tobytes()

    def state_size(self, *, seq: int) -> int:
        return len(self.get_state(seq=seq))

    def read_state(self, out: memoryview, *, seq: int) -> None:
        out[:] = self.get_state(seq=seq)

    def send_state(self, address: int, size: int, *, seq: int) -> int:
        state, there = self.get_state(seq=seq), self.view(address, size)

        def send() -> None:
            there[:] = state

        with self._queue_lock:
            self._ticket += 1
            self._queue.append(Transfer(self._ticket, False, [], send))
            self._drift()
            return self._ticket

    def set_state(self, data: bytes, length: int, *, seq: int) -> None:
        assert seq == 0
        self.synchronize()  # the data may be a state that is on its way to the host
        if not (self.info.recurrent or self.info.n_swa):
            if data:
                raise SnapshotError("the recurrent state does not fit this context")
            return
        values = np.frombuffer(data, "<i4").tolist() if len(data) % 4 == 0 else []
        if len(values) < 2 or len(values) != values[0] + 2 or values[0] != length:
            self._state = None  # half read
            raise SnapshotError("the recurrent state does not fit this context")
        self._state, self._window_first = values[2:], values[1]

    def keep_state(self, *, seq: int) -> None:
        self._kept = None
        if self.faults.full:
            raise HostMemoryError("no memory to keep a state")
        self._kept = self.get_state(seq=seq)

    def put_state(self, length: int, *, seq: int) -> None:
        if self._kept is None:
            raise SnapshotError("no state is kept that could be put back")
        self.set_state(self._kept, length, seq=seq)

    def adopt(self, truth: abc.Sequence[bytes], tokens: abc.Sequence[int]) -> None:
        """A saved text has been loaded: its rows were computed elsewhere."""
        self.truth[:], self.tokens[:] = truth, tokens

    def close(self) -> None:
        assert not self.closed
        assert not self._queue
        self.closed = True

    def check_open(self) -> None:
        if self.closed:
            raise KVFlashError(CLOSED)


def make_session(
    engine: Any,
    config: KVFlashConfig,
    *,
    n_ctx: int,
    n_batch: int,
    n_ubatch: int,
    scorer: Scorer | None = None,
    block_order: abc.Sequence[int] | None = None,
    stage: int = 0,
) -> Sequence:
    """A text on a pool of its own. stage: tokens that streamed steps see, which prompts are read with then."""
    limit = None if config.host_limit == "auto" else config.host_limit
    pool = Pool(engine, n_ubatch=n_ubatch, host_limit=limit, spill=config.spill, block_order=block_order)
    reading = POOL
    if stage:
        pool.make_stages(stage)
        reading = Reading(exact=True, answers_exactly=config.answer == "exact")
    return Sequence(pool, config, seq=0, n_ctx=n_ctx, n_batch=n_batch, scorer=scorer, reading=reading)
