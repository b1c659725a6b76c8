"""The engine of one context: the native seam as Python sees it. No pointer leaves this file but as an opaque number."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import Buffer, Floats, Int32s, room_for
from ..constants import CHUNK
from ..errors import CLOSED, ConfigError, EngineError, KVFlashError, UnsupportedModelError
from ..media.rows import Part, are_mutual
from . import contexts
from ._kvf import ffi, lib
from .info import DeviceInfo, EngineInfo, Layer, read_info, read_layers
from .status import check, value
from .streamed import Streamed

__all__ = ["DeviceInfo", "EngineInfo", "Layer", "PagedEngine", "plane_bytes", "pool_request", "probe"]

Addresses = Sequence[int] | npt.NDArray[np.uint64]

_PLANNED = ("token", "seq", "pos", "slot", "query_row")


@contextlib.contextmanager
def pool_request(cells: int, query_rows: int = 0) -> Iterator[None]:
    """Let contexts that this thread makes within have a pool of `cells` slots, 0 for a stock cache."""
    lib.kvf_set_pool(cells, query_rows)
    try:
        yield
    finally:
        lib.kvf_set_pool(0, 0)


def probe(model: int, *, type_k: int, type_v: int, offload: bool, arch: str) -> tuple[int, ...]:
    """Return the bytes of one slot on each device, in the model's order, and on the host.

    model: address of the llama_model. type_k, type_v: ggml type numbers. UnsupportedModelError if the model cannot run
    in a pool, EncoderError for an encoder, ConfigError if its cache cannot have these types.
    """
    sizes: Any = ffi.new("int64_t[]", lib.kvf_model_n_devices(ffi.cast("void *", model)))
    try:
        check(lib.kvf_probe(ffi.cast("void *", model), type_k, type_v, offload, sizes, len(sizes)))
    except UnsupportedModelError as err:
        raise type(err)(f"architecture {arch!r} cannot run in a pool: {err}. Use kvflash=None.") from None
    except EngineError as err:
        raise ConfigError(str(err)) from None
    return tuple(sizes)


def plane_bytes(model: int) -> int:
    """Return the bytes of a rollback plane (of `n_rs_seq`) of the llama_model at this address, 0 if it has none."""
    return int(lib.kvf_plane_bytes(ffi.cast("void *", model)))


class PagedEngine:
    """Executes plans on a context that was made with a pool.

    context: address of the llama_context, which must outlive the engine. Steps of at most `max_tokens` tokens.
    What the library refuses is an EngineError that says why, or an UnsupportedError; nothing has changed then.

    A step reads these arrays [max_tokens], which belong to the caller and keep their values:
    token, seq, pos, slot, output (1: keep the logits), query_row (the row of `read_queries` that takes the query
    of a token, each named once, or -1 for none). Siblings of a tree have one position, and a slot each. A context made
    for several sequences takes tokens of any of them in one step, trees excepted.

    All else counts rows of a text. places: by sequence the position of each row, [rows + 1], where that is not its
    number, since rows of an image share one; true up to the row behind the text. The caller keeps it.
    """

    closed = False

    def __init__(self, context: int, max_tokens: int) -> None:
        self._context = context
        handle = ffi.new("kvf_engine **")
        self._engine = value(lib.kvf_engine_init(ffi.cast("void *", context), handle), handle)
        self.info = read_info(self._engine)
        self.layers = read_layers(self._engine, self.info.n_layers)

        # everything a step needs is allocated here, once
        self.token = np.zeros(max_tokens, np.int32)
        self.seq = np.zeros(max_tokens, np.int32)
        self.pos = np.zeros(max_tokens, np.int32)
        self.slot = np.zeros(max_tokens, np.int32)
        self.query_row = np.full(max_tokens, -1, np.int32)
        self.output = np.zeros(max_tokens, np.int8)
        self.places: dict[int, Int32s] = {}
        self._plan = ffi.new("kvf_plan *")
        self._plan.mask_stride = self.info.n_slots
        self._keep = {x: ffi.from_buffer("int32_t[]", getattr(self, x)) for x in _PLANNED}
        self._keep["output"] = ffi.from_buffer("int8_t[]", self.output)
        for name, data in self._keep.items():
            setattr(self._plan, name, data)

    # --- steps

    def use_mask(self, rows: npt.NDArray[np.floating]) -> None:
        """Read mask rows from this array, shape [max_tokens, n_slots], from now on."""
        shape, kind = (len(self.token), self.info.n_slots), np.float32 if self.info.mask_f32 else np.float16
        if rows.shape != shape or rows.dtype != kind or not rows.flags.c_contiguous:
            raise EngineError(f"the mask is {rows.dtype} {rows.shape}, the engine reads {np.dtype(kind)} {shape}")
        self._mask = ffi.from_buffer(rows)
        self._plan.mask = self._mask

    def fix_view(self) -> None:
        """Let each step attend to all slots, not only to those from the first to the last of its sequences."""
        self._plan.fixed_view = 1

    def make_stages(self, slots: int, tokens: int) -> int:
        """Let steps of up to `tokens` attend to the text in page images, up to `slots` of it (a multiple of 256).

        Returns the bytes that it takes on the devices, without what computing larger steps needs. HostMemoryError if
        there is no memory, UnsupportedError if a layer attends in a way of its own.
        """
        size = ffi.new("int64_t *")
        return int(value(lib.kvf_stage_init(self._engine, slots, tokens, size), size))

    @property
    def streamed_bytes(self) -> int:
        """Bytes that streamed steps have copied from page images."""
        return int(lib.kvf_streamed_bytes(self._engine))

    @property
    def streamed_ticket(self) -> int:
        """The transfer after which the newest streamed step has read its page images."""
        return int(lib.kvf_streamed_ticket(self._engine))

    def step(
        self, count: int, wait: int, codes: list[int], streamed: Streamed | None = None, media: Part | None = None
    ) -> None:
        """Evaluate the first `count` entries of the arrays under the mask.

        wait: transfer that must be done before the compute starts, 0 for none.
        codes: empty; takes 0 if all went well, and another number if no token was kept.
        streamed: what the step attends to if that is not the pool. Images may move after `streamed_ticket`.
        media: so many rows, of `info.n_embd` values, that are evaluated in place of tokens. They see each other if
        `token` says so, `n_ubatch` at most; the mask says it of the pool.

        Raises:
            DecodeError: llama_decode failed. Recurrent state and captured queries may have changed.
            EngineError: the plan is impossible.
            DeviceLost: a server does not answer any more. Recurrent state is void.
        """
        if count > len(self.token):
            raise EngineError(f"a step of {count} tokens, the engine was made for {len(self.token)}")
        if streamed is not None and len(streamed.images) == 0:  # to C++ a step without images reads the pool
            raise EngineError("a streamed step over 0 page images, at least 1 is needed: let it read the pool")
        self._plan.n_tokens = count
        self._plan.wait = wait
        if media is not None:
            self._step_media(codes, streamed, media)
            return
        # computed and noted in a single call: an interrupt, which Python delivers between two, loses neither
        if streamed is None:
            codes.extend(map(lib.kvf_step, [self._engine], [self._plan]))
        else:
            with self._attending(streamed):
                codes.extend(map(lib.kvf_step, [self._engine], [self._plan]))
        if codes[0] != lib.KVF_STATUS_SUCCESS:
            check(codes[0])

    def _step_media(self, codes: list[int], streamed: Streamed | None, media: Part) -> None:
        rows, shape = media.rows, (self._plan.n_tokens, self.info.n_embd)
        if rows.shape != shape or rows.dtype != np.float32:
            raise EngineError(f"media rows are {rows.dtype} {rows.shape}, the engine reads float32 {shape}")
        n_pos = self.info.n_pos
        if media.axes is not None and n_pos == 1:
            raise EngineError("media rows with 4 positions each for a model with 1: they are of another model")
        data, pos = ffi.from_buffer("float[]", np.ascontiguousarray(rows)), self._keep["pos"]
        if n_pos > 1:
            if media.axes is None:
                axes = np.tile(self.pos[: len(rows)], (n_pos, 1))
            else:
                axes = media.axes + (self.pos[0] - media.axes[0, 0])
                axes[3] = media.axes[3]
            pos = ffi.from_buffer("int32_t[]", np.ascontiguousarray(axes, np.int32))
        try:
            self._plan.embd, self._plan.pos, self._plan.mutual = data, pos, are_mutual(self.token)
            self.step(shape[0], self._plan.wait, codes, streamed)
        finally:
            self._plan.embd, self._plan.pos, self._plan.mutual = ffi.NULL, self._keep["pos"], 0

    @contextlib.contextmanager
    def _attending(self, streamed: Streamed) -> Iterator[None]:
        """Make the plan one of a streamed step within."""
        plan, images = self._plan, np.ascontiguousarray(streamed.images, np.uint64)
        kept = ffi.from_buffer("uint64_t[]", images), ffi.from_buffer(streamed.mask)
        heads, rows = streamed.wanted
        wanted = ffi.from_buffer("kvf_head[]", heads), ffi.from_buffer("int32_t[]", rows)
        try:
            plan.n_streamed, plan.streamed, plan.mask = len(images), *kept
            plan.mask_stride, plan.mask_first = streamed.mask.shape[1], streamed.first
            plan.open_rows, plan.open_block = streamed.rows, streamed.block
            plan.n_mass_heads, plan.n_mass_rows = len(heads), len(rows)
            plan.mass_heads, plan.mass_row = wanted
            yield
        finally:
            plan.n_streamed, plan.mask, plan.mask_stride = 0, self._mask, self.info.n_slots

    def synchronize(self) -> None:
        lib.kvf_synchronize(self._engine)

    # --- what drafters are given

    def open_features(self, layers: Sequence[int], *, nextn: bool = False) -> int:
        """Keep of every token of a step the inputs of these layers, and the state in front of the head.

        Once, before the first step. Returns how many values that is for a token. UnsupportedError if llama.cpp does not
        hand them out for this architecture, HostMemoryError if there is no memory.
        """
        width = ffi.new("int32_t *")
        names = ffi.new("int32_t[]", layers)
        return int(value(lib.kvf_features_open(self._engine, len(layers), names, nextn, width), width))

    def read_features(self, first: int, out: Floats) -> None:
        """Fill `out` [n, width] with what is kept of the last step's tokens from `first` on. Waits for the compute.

        EngineError if the last step had fewer tokens, or failed.
        """
        data = ffi.from_buffer("float[]", out, require_writable=True)
        check(lib.kvf_features_read(self._engine, first, len(out), data))

    # --- transfers

    def page_out(self, blocks: Sequence[int], images: Sequence[int]) -> int:
        """Copy blocks to page images, behind the compute submitted so far. Returns the ticket of the transfer."""
        return self._transfer(lib.kvf_page_out, blocks, images)

    def page_in(self, blocks: Sequence[int], images: Sequence[int]) -> int:
        """Copy page images to blocks. The next step waits for it on the device, not here."""
        return self._transfer(lib.kvf_page_in, blocks, images)

    def _transfer(self, call: Callable[..., int], blocks: Sequence[int], images: Sequence[int]) -> int:
        n, ticket = len(blocks), ffi.new("uint64_t *")
        if len(images) != n:
            raise EngineError(f"{n} blocks and {len(images)} page images")
        where, what = ffi.new("int32_t[]", blocks), ffi.new("uint64_t[]", images)
        return int(value(call(self._engine, n, where, what, ticket), ticket))

    def blank(self, image: memoryview, first: int) -> None:
        """Zero the rows of a page image from row `first` on: what was there belongs to another text."""
        for x in self.layers:
            for at, row in ((x.k_offset, x.k_row), (x.v_offset, x.v_row)):
                image[at + first * row : at + CHUNK * row] = bytes((CHUNK - first) * row)

    # --- what llama.cpp believes about the slots

    def clear_cells(self, slot: int, count: int) -> None:
        """Empty the slots from `slot` on."""
        check(lib.kvf_cells_clear(self._engine, slot, count))

    def zero_unused(self) -> None:
        """Zero what no sequence has: empty slots, windows, states, layer buffers. Waits for all compute and transfers.

        A kernel may multiply a hidden row with 0: what a dropped text has left there must be finite.
        """
        lib.kvf_zero_unused(self._engine)

    # --- rows and positions

    def end(self, rows: int, *, seq: int) -> int:
        """Return the position behind the first `rows` rows of a sequence."""
        places = self.places.get(seq)
        return rows if places is None or rows == 0 else int(places[rows - 1]) + 1

    def whole(self, row: int, *, seq: int) -> int:
        """Return the last row, `row` at most, that a text can be cut at: rows of one position go together."""
        places = self.places.get(seq)
        return row if places is None else int(np.searchsorted(places[: row + 1], places[row]))

    def _first(self, row: int, seq: int) -> int | None:
        """Return the position from which a cut at `row` removes all; None where that would remove more."""
        places = self.places.get(seq)
        if places is None:
            return row
        return int(places[row]) if self.whole(row, seq=seq) == row else None

    def set_cells(self, slot: int, row: int, tokens: Int32s, *, seq: int) -> None:
        """Let the slots from `slot` on hold these tokens, the rows from `row` on."""
        known = np.maximum(np.ascontiguousarray(tokens, np.int32), -1)  # to llama.cpp a media row has no token, -1
        places, end = self.places.get(seq), row + len(tokens)
        where = np.arange(row, end, dtype=np.int32) if places is None else places[row:end]
        pos, data = ffi.from_buffer("int32_t[]", where), ffi.from_buffer("int32_t[]", known)
        check(lib.kvf_cells_set(self._engine, seq, slot, len(tokens), pos, data))

    def cells(self, slot: int, count: int) -> Int32s:
        """Return the positions in the slots, -1 where empty; [count]."""
        out = np.empty(count, np.int32)
        check(lib.kvf_cells_get(self._engine, slot, count, ffi.from_buffer("int32_t[]", out)))
        return out

    def settle(self, source: Sequence[int], target: Sequence[int], codes: list[int]) -> None:
        """Move what is in the slots `source` to `target`, bit for bit; one that is taken must be among `source`.

        codes: empty; takes 0 if they have moved, and another number if nothing has.
        """
        n = len(source)
        if len(target) != n:
            raise EngineError(f"{n} slots to settle in {len(target)}")
        where, to = ffi.new("int32_t[]", source), ffi.new("int32_t[]", target)
        codes.extend(map(lib.kvf_settle, [self._engine], [n], [where], [to]))  # done and noted in one call
        check(codes[0])

    def truncate(self, row: int, *, seq: int) -> bool:
        """Remove rows from `row` on. False: this memory cannot, or not within an image; nothing has changed.

        Recurrent state goes as a whole, or back once after a step: by at most `info.rs_planes`, less than the step.
        """
        first, done = self._first(row, seq), ffi.new("int32_t *")
        return first is not None and bool(value(lib.kvf_truncate(self._engine, seq, first, done), done))

    def can_truncate(self, row: int, *, seq: int) -> bool:
        """Report whether `truncate` would succeed, whatever a sliding window still holds."""
        first, can = self._first(row, seq), ffi.new("int32_t *")
        return first is not None and bool(value(lib.kvf_can_truncate(self._engine, seq, first, can), can))

    def clear(self, *, seq: int) -> None:
        """Empty the memory of a sequence."""
        check(lib.kvf_clear(self._engine, seq))
        self.places.pop(seq, None)

    def window_start(self, *, seq: int) -> int:
        """Return the oldest position that sliding-window layers still hold, -1 if there are none."""
        pos = ffi.new("int32_t *")
        return int(value(lib.kvf_swa_first(self._engine, seq, pos), pos))

    # --- state that is not pooled

    def get_state(self, *, seq: int) -> Buffer:
        """Return recurrent state and sliding-window rings; empty for a plain cache. SnapshotError if that fails."""
        size = self.state_size(seq=seq)
        if size == 0:
            return b""
        data = room_for(size)
        self.read_state(data, seq=seq)
        return data

    def state_size(self, *, seq: int) -> int:
        """Return the size of `get_state` in bytes."""
        out = ffi.new("int64_t *")
        return int(value(lib.kvf_state_size(self._engine, seq, out), out))

    def read_state(self, out: memoryview, *, seq: int) -> None:
        """Write `get_state` to `out`, [state_size]. Waits for the compute."""
        data = ffi.from_buffer("uint8_t[]", out, require_writable=True)
        check(lib.kvf_state_get(self._engine, seq, data, len(out), ffi.NULL))

    def send_state(self, address: int, size: int, *, seq: int) -> int:
        """Write `get_state` to page-locked memory from `alloc`, [state_size], behind the compute submitted so far.

        Returns the ticket of the transfer, which the next step waits for; 0 if it is done: not all devices can do that.
        """
        data, ticket = ffi.cast("uint8_t *", address), ffi.new("uint64_t *", 0)
        return int(value(lib.kvf_state_get(self._engine, seq, data, size, ticket), ticket))

    def set_state(self, data: Buffer, end: int, *, seq: int) -> None:
        """Put back what `get_state` returned when the text ended before position `end`. Without it on SnapshotError."""
        check(lib.kvf_state_set(self._engine, seq, ffi.from_buffer("uint8_t[]", data), len(data), end))

    def keep_state(self, *, seq: int) -> None:
        """Keep on the devices what `get_state` returns, in place of what was kept of it before. Nothing waits for it.

        HostMemoryError if they have no room; nothing is kept then.
        """
        check(lib.kvf_state_keep(self._engine, seq))

    def put_state(self, end: int, *, seq: int) -> None:
        """Set the state that `keep_state` kept last, as `set_state` does. It stays kept. SnapshotError if there is
        none.
        """
        check(lib.kvf_state_put(self._engine, seq, end))

    def argmax(self, rows: Sequence[int] | Int32s) -> Int32s:
        """Return the likeliest token of each of these rows of the newest step, [n]."""
        return contexts.argmax(self._context, rows)

    def set_logits(self, row: Floats) -> None:
        """Make `row` [n_vocab] the logits of the last token, as if it had just been evaluated."""
        check(lib.kvf_logits_set(self._engine, ffi.from_buffer("float[]", row), len(row)))

    # --- what steps leave behind for scoring

    @property
    def query_shapes(self) -> list[tuple[int, int, int]]:
        """Per pooled layer (rows, n_head, head_k): the shapes of the captured queries.

        There is a row more than `info.query_rows`; what is in it means nothing.
        """
        rows = self.info.query_rows + 1 if self.info.query_rows else 0
        return [(rows, layer.n_head, layer.head_k) for layer in self.layers]

    def read_queries(self, out: Floats, rows: Int32s | None = None) -> int:
        """Copy the captured queries of all layers to `out` (flat), behind the compute submitted so far; or `rows`.

        Returns the ticket. The query of a token is in the row that `query_row` named when it was evaluated.
        """
        ticket = ffi.new("uint64_t *")
        data = ffi.from_buffer("float[]", self._queries(out), require_writable=True)
        rows = np.arange(self.info.query_rows + 1, dtype=np.int32) if rows is None else rows
        which = ffi.from_buffer("int32_t[]", rows)
        return int(value(lib.kvf_query_read(self._engine, len(rows), which, data, ticket), ticket))

    def write_queries(self, rows: Floats) -> None:
        """Put back what `read_queries` has read."""
        check(lib.kvf_query_write(self._engine, ffi.from_buffer("float[]", self._queries(rows))))

    def _queries(self, rows: Floats) -> Floats:
        size = sum(math.prod(shape) for shape in self.query_shapes)
        if rows.size != size or rows.dtype != np.float32:
            raise EngineError(f"{rows.size} values ({rows.dtype}) for queries, all layers have {size} (float32)")
        return rows

    def read_masses(self, out: Floats) -> int:
        """Copy to `out` [heads * rows, chunks] what the newest streamed step was asked for, see `Streamed.wanted`.

        Of the whole chunks that it has seen, in their order, and then those with its own tokens: as `score_keys` gives
        it, from every key. Behind the compute submitted so far; returns the ticket. UnsupportedError, with the reason,
        if it could not be computed beside the step.
        """
        ticket = ffi.new("uint64_t *")
        data = ffi.from_buffer("float[]", out, require_writable=True)
        return int(value(lib.kvf_masses_read(self._engine, data, out.size, ticket), ticket))

    def score_device_index(
        self, units: Int32s, heads: Int32s, offset: int, count: int, rows: Int32s, out: Floats
    ) -> None:
        """Score as `score_index` does, from the `count` index rows that `put_index` put there, for the captured queries
        in these rows. Fills `out` [heads * rows, count], at most INDEX_SCORES values.

        On the thread of the steps, behind the compute submitted so far. `out` is filled once a later transfer is done,
        such as `read_queries`.
        """
        data = ffi.from_buffer("float[]", out, require_writable=True)
        check(lib.kvf_index_score_there(self._engine, len(units), _heads(units), len(heads), _heads(heads), count,
                                        offset, len(rows), ffi.from_buffer("int32_t[]", rows), data))  # fmt: skip

    # --- scoring beside a decode, on any thread

    def keys(self, page: npt.NDArray[np.uint8]) -> list[Floats]:
        """Return the keys of a page image, dequantised: per layer [CHUNK, n_head_kv, head_k]."""
        return [
            np.stack([self.head_keys(page, i, head) for head in range(x.n_head_kv)], axis=1)
            for i, x in enumerate(self.layers)
        ]

    def head_keys(self, page: npt.NDArray[np.uint8], layer: int, head: int) -> Floats:
        """Return the keys of one KV head of a page image, dequantised: [CHUNK, head_k]."""
        if page.nbytes != self.info.page_bytes:
            raise EngineError(f"a page image of {page.nbytes} bytes, it has {self.info.page_bytes}")
        keys: Floats = np.empty((CHUNK, self.layers[layer].head_k), np.float32)
        which, image = _heads(np.array([[layer, head]], np.int32)), ffi.from_buffer("uint8_t[]", page)
        check(lib.kvf_keys_read(self._engine, which, image, ffi.from_buffer("float[]", keys)))
        return keys

    def index_size(self, units: Int32s) -> int:
        """Return the bytes of the index row of a chunk. units: the KV heads in it, (pooled layer, KV head) [n, 2],
        ascending.
        """
        size = ffi.new("int64_t *")
        return int(value(lib.kvf_index_size(self._engine, len(units), _heads(units), size), size))

    def build_index(self, units: Int32s, image: int, out: npt.NDArray[np.uint8]) -> None:
        """Fill `out` (shape [index_size]) with the keys of these KV heads in a page image, at 4 bits."""
        data = ffi.from_buffer("uint8_t[]", out, require_writable=True)
        check(lib.kvf_index_build(self._engine, len(units), _heads(units), ffi.cast("uint8_t *", image), data))

    def score_index(
        self, units: Int32s, heads: Int32s, addresses: Addresses, rows: int, queries: Floats,
        threads: int,
    ) -> Floats:  # fmt: skip
        """Score as `score_keys` does, from the index rows at these addresses. `units`: those that the rows were built
        for.
        """
        which = len(units), _heads(units)
        return self._score(lib.kvf_index_score, which, heads, addresses, rows, queries, threads)

    def open_index(self, size: int) -> int:
        """Make room for `size` bytes of index rows on the device of all pooled layers, once. Returns the bytes that it
        takes there. UnsupportedError if there is none that scores by them, HostMemoryError if there is no room.
        """
        taken = ffi.new("int64_t *")
        return int(value(lib.kvf_index_open(self._engine, size, taken), taken))

    def put_index(self, offset: int, addresses: npt.NDArray[np.uint64], size: int) -> None:
        """Copy the index rows of `size` bytes at these addresses to the device, one behind the other."""
        rows = ffi.from_buffer("uint64_t[]", addresses)
        check(lib.kvf_index_put(self._engine, offset, len(addresses), rows, size))

    def score_keys(self, heads: Int32s, images: Addresses, rows: int, queries: Floats, threads: int) -> Floats:
        """Log of the attention mass per page image, before normalisation; shape [len(heads) * rows, n].

        heads: query heads, (pooled layer, head) [k, 2], ascending. queries: flat, per head [rows, head_k].
        """
        return self._score(lib.kvf_keys_score, (), heads, images, rows, queries, threads)

    def _score(
        self, call: Callable[..., int], which: Sequence[object], heads: Int32s, addresses: Addresses, rows: int,
        queries: Floats, threads: int,
    ) -> Floats:  # fmt: skip
        out = np.empty((len(heads) * rows, len(addresses)), np.float32)
        chunks = ffi.from_buffer("uint64_t[]", np.ascontiguousarray(addresses, np.uint64))
        check(call(self._engine, *which, len(heads), _heads(heads), len(addresses), chunks, rows,
                   ffi.from_buffer("float[]", queries), ffi.from_buffer("float[]", out), threads))  # fmt: skip
        return out

    # --- host memory (host.slabs.HostMemory)

    def alloc(self, size: int) -> int:
        """Allocate bytes, page-locked where the device can use that. Return their address, 0 if there is no memory."""
        data = ffi.new("void **")
        if lib.kvf_host_alloc(self._engine, size, data) != lib.KVF_STATUS_SUCCESS:
            return 0
        return int(ffi.cast("uintptr_t", data[0]))

    def free(self, address: int) -> None:
        lib.kvf_host_free(self._engine, ffi.cast("void *", address))

    def view(self, address: int, size: int) -> memoryview:
        return memoryview(ffi.buffer(ffi.cast("char *", address), size)).cast("B")

    def wait(self, ticket: int) -> None:
        """Return when the transfer is done."""
        if ticket:
            lib.kvf_wait(self._engine, ticket)

    def is_sound(self, ticket: int) -> bool:
        """Report whether a transfer is valid: no server was lost before it was done. Waits for servers only."""
        return not ticket or bool(lib.kvf_sound(self._engine, ticket))

    @property
    def is_lost(self) -> bool:
        """Whether a server of its devices does not answer any more. False for a closed engine."""
        engine = vars(self).get("_engine")
        return engine is not None and bool(lib.kvf_check_lost(engine) != lib.KVF_STATUS_SUCCESS)

    def check_lost(self) -> None:
        """Raise DeviceLost if a server of its devices does not answer any more."""
        check(lib.kvf_check_lost(self._engine))

    def check_open(self) -> None:
        """Raise KVFlashError if the engine is closed."""
        if self.closed:
            raise KVFlashError(CLOSED)

    def close(self) -> None:
        """Wait for all work and free the engine. The context stays."""
        engine = vars(self).pop("_engine", None)  # first, so that an interrupt cannot free it twice
        self.closed = True
        if engine is not None:
            lib.kvf_engine_free(engine)

    def __getattr__(self, name: str) -> Any:
        if name == "_engine":  # a call after `close` must not reach the library
            raise KVFlashError(CLOSED)
        raise AttributeError(f"a PagedEngine has no {name}")


def _heads(heads: Int32s) -> object:
    if heads.ndim != 2 or heads.shape[1] != 2:
        raise EngineError(f"heads are (layer, head) in rows, not an array of shape {heads.shape}")
    return ffi.from_buffer("kvf_head[]", np.ascontiguousarray(heads, np.int32))
