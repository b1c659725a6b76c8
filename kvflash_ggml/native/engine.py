"""The engine of one context: the native seam as Python sees it. No pointer leaves this file but as an opaque number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import gguf
import numpy as np
import numpy.typing as npt

from ..arrays import Int32s
from ..constants import CHUNK
from ..errors import DecodeError, SnapshotError, UnsupportedModelError
from ._kvf import ffi, lib

Addresses = Sequence[int] | npt.NDArray[np.uint64]

assert lib.KVF_BLOCK == CHUNK


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One pooled layer. Offsets and rows are bytes in a page image of CHUNK rows; `has_v` is false if V is a view of K.

    scale: what attention multiplies q*k with; 0 unless queries are captured.
    """

    il: int
    n_head: int
    n_head_kv: int
    head_k: int
    head_v: int
    has_v: bool
    k_offset: int
    k_row: int
    v_offset: int
    v_row: int
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What the pooled cache looks like; `n_swa` and `recurrent` tell what else the memory holds. Sizes are bytes.

    rotated: bit 0 if keys are stored rotated, bit 1 if values are.
    """

    n_slots: int
    n_layers: int
    n_pos: int
    n_swa: int
    recurrent: bool
    alibi: bool
    mask_f32: bool
    v_trans: bool
    query_rows: int
    pinned: bool
    asynchronous: bool
    page_bytes: int
    device_bytes: int
    rotated: int
    type_k: str
    type_v: str
    device: str


def set_pool(cells: int, query_rows: int = 0) -> None:
    """The next context made by this thread gets a pool of `cells` slots; 0 restores stock behaviour."""
    lib.kvf_set_pool(cells, query_rows)


def probe(model: int, *, type_k: int, type_v: int, offload: bool, arch: str) -> int:
    """Bytes one slot takes on the device. Raises UnsupportedModelError if the model cannot run in a pool.

    model: address of the llama_model. type_k, type_v: ggml type numbers.
    """
    size = ffi.new("int64_t *")
    why = ffi.new("char[512]")
    if lib.kvf_probe(ffi.cast("void *", model), type_k, type_v, offload, size, why, 512) != 0:
        reason = ffi.string(why).decode("utf-8", "replace")
        raise UnsupportedModelError(f"architecture {arch!r} cannot run in a pool: {reason}. Use kvflash=None.")
    return int(size[0])


def device_memory(model: int) -> tuple[int, int, bool]:
    """(free bytes, total bytes, is a GPU) of the device that would hold the pool."""
    free, total = ffi.new("int64_t *"), ffi.new("int64_t *")
    is_gpu = lib.kvf_device_memory(ffi.cast("void *", model), free, total)
    return int(free[0]), int(total[0]), bool(is_gpu)


class Engine:
    """Executes plans on a context that was made with a pool.

    context: address of the llama_context, which must outlive the engine. Steps of at most `max_tokens` tokens.
    """

    def __init__(self, context: int, max_tokens: int) -> None:
        handle = ffi.new("kvf_engine **")
        why = ffi.new("char[512]")
        if lib.kvf_open(ffi.cast("void *", context), handle, why, 512) != 0:
            raise UnsupportedModelError(ffi.string(why).decode("utf-8", "replace"))
        self._engine = handle[0]
        self.info = self._read_info()
        self.layers = self._read_layers()

        # everything a step needs is allocated here, once
        self.token = np.zeros(max_tokens, np.int32)
        self.pos = np.zeros(max_tokens, np.int32)
        self.slot = np.zeros(max_tokens, np.int32)
        self.output = np.zeros(max_tokens, np.int8)
        self._plan = ffi.new("kvf_plan *")
        self._keep = [ffi.from_buffer(x) for x in (self.token, self.pos, self.slot, self.output)]
        self._plan.token = ffi.cast("int32_t *", self._keep[0])
        self._plan.pos = ffi.cast("int32_t *", self._keep[1])
        self._plan.slot = ffi.cast("int32_t *", self._keep[2])
        self._plan.output = ffi.cast("int8_t *", self._keep[3])
        self._plan.mask_stride = self.info.n_slots

    # --- steps

    def use_mask(self, rows: npt.NDArray[np.floating]) -> None:
        """Read mask rows from this array, shape [max_tokens, n_slots], from now on."""
        assert rows.flags.c_contiguous
        assert rows.shape[1] == self.info.n_slots
        assert rows.dtype == (np.float32 if self.info.mask_f32 else np.float16)
        self._mask = ffi.from_buffer(rows)
        self._plan.mask = self._mask

    def step(self, count: int, wait: int, codes: list[int]) -> None:
        """Evaluate the first `count` entries of token, pos, slot and output under the mask.

        wait: transfer that must be done before the compute starts, 0 for none. Keeps nothing on DecodeError.
        codes: empty; takes what llama_decode returns, 0 if all went well.
        """
        self._plan.n_tokens = count
        self._plan.wait = wait
        # computed and noted in a single call: an interrupt, which Python delivers between two, loses neither
        codes.extend(map(lib.kvf_step, [self._engine], [self._plan]))
        if codes != [0]:
            raise DecodeError(f"llama_decode returned {codes[0]} for {count} tokens")

    def synchronize(self) -> None:
        lib.kvf_synchronize(self._engine)

    @property
    def decode_seconds(self) -> float:
        """Time spent inside llama_decode since the engine was opened."""
        return float(lib.kvf_decode_ns(self._engine)) * 1e-9

    # --- transfers

    def page_out(self, blocks: Sequence[int], images: Sequence[int]) -> int:
        """Copy blocks to page images, behind the compute submitted so far. Returns the ticket of the transfer."""
        return self._transfer(lib.kvf_page_out, blocks, images)

    def page_in(self, blocks: Sequence[int], images: Sequence[int]) -> int:
        """Copy page images to blocks. The next step waits for it on the device, not here."""
        return self._transfer(lib.kvf_page_in, blocks, images)

    def _transfer(self, call: object, blocks: Sequence[int], images: Sequence[int]) -> int:
        ticket = int(call(self._engine, len(blocks), ffi.new("int32_t[]", blocks), ffi.new("uint64_t[]", images)))  # type: ignore[operator]
        assert ticket > 0, "a block out of range, or a cache whose pages cannot move"
        return ticket

    def blank(self, image: memoryview, first: int) -> None:
        """Zero the rows of a page image from row `first` on: what was there belongs to another text."""
        for x in self.layers:
            for at, row in ((x.k_offset, x.k_row), (x.v_offset, x.v_row)):
                image[at + first * row : at + CHUNK * row] = bytes((CHUNK - first) * row)

    # --- what llama.cpp believes about the slots

    def clear_cells(self, slot: int, count: int) -> None:
        _check(lib.kvf_cells_clear(self._engine, slot, count))

    def set_cells(self, slot: int, pos: int, tokens: Int32s) -> None:
        data = ffi.from_buffer("int32_t[]", np.ascontiguousarray(tokens, np.int32))
        _check(lib.kvf_cells_set(self._engine, slot, len(tokens), pos, data))

    def cells(self, slot: int, count: int) -> Int32s:
        """Positions in the slots, -1 where empty; shape [count]."""
        out = np.empty(count, np.int32)
        _check(lib.kvf_cells_get(self._engine, slot, count, ffi.from_buffer("int32_t[]", out)))
        return out

    def truncate(self, pos: int) -> bool:
        """Remove positions >= pos. False: this memory cannot, and nothing has changed."""
        return bool(lib.kvf_truncate(self._engine, pos))

    def clear(self) -> None:
        lib.kvf_clear(self._engine)

    @property
    def window_start(self) -> int:
        """Oldest position that the sliding-window layers still hold, -1 if there are none."""
        return int(lib.kvf_swa_first(self._engine))

    # --- state that is not pooled

    def get_state(self) -> bytes | bytearray:
        """Recurrent state and sliding-window rings; empty for a plain cache."""
        size = lib.kvf_state_size(self._engine)
        if size == 0:
            return b""
        data = bytearray(size)
        if lib.kvf_state_get(self._engine, ffi.from_buffer("uint8_t[]", data, require_writable=True), size) != size:
            raise SnapshotError("llama.cpp could not write the recurrent state")
        return data

    def set_state(self, data: bytes | bytearray, length: int) -> None:
        """Put back what `get_state` returned when the text had `length` tokens. Without it on SnapshotError."""
        if lib.kvf_state_set(self._engine, ffi.from_buffer("uint8_t[]", data), len(data), length) != 0:
            raise SnapshotError("the recurrent state or sliding window does not fit this context and this text")

    def set_logits(self, row: npt.NDArray[np.float32]) -> None:
        """Make `row` [n_vocab] the logits of the last token, as if it had just been evaluated."""
        _check(lib.kvf_logits_set(self._engine, ffi.from_buffer("float[]", row), len(row)))

    # --- host memory (host.slabs.HostMemory)

    def alloc(self, size: int) -> int:
        return int(ffi.cast("uintptr_t", lib.kvf_host_alloc(self._engine, size)))

    def free(self, address: int) -> None:
        lib.kvf_host_free(self._engine, ffi.cast("void *", address))

    def view(self, address: int, size: int) -> memoryview:
        return memoryview(ffi.buffer(ffi.cast("char *", address), size)).cast("B")

    def wait(self, ticket: int) -> None:
        """Return when the transfer is done."""
        if ticket:
            lib.kvf_wait(self._engine, ticket)

    def plain_copy(self, size: int, *, to_device: bool) -> float:
        """Seconds of one plain copy of `size` bytes between page-locked memory and the device."""
        seconds = float(lib.kvf_plain_copy(self._engine, size, to_device))
        if seconds < 0:
            raise MemoryError(f"no memory for a copy of {size} bytes")
        return seconds

    # --- scoring on the host

    def keys(self, page: npt.NDArray[np.uint8]) -> list[npt.NDArray[np.float32]]:
        """The keys of a page image, dequantised: per layer [CHUNK, n_head_kv, head_k]."""
        return [self.layer_keys(page, i) for i in range(len(self.layers))]

    def layer_keys(self, page: npt.NDArray[np.uint8], layer: int) -> npt.NDArray[np.float32]:
        """The keys of one layer of a page image, dequantised: [CHUNK, n_head_kv, head_k]."""
        kind = gguf.GGMLQuantizationType[self.info.type_k.upper()]
        x = self.layers[layer]
        rows = page[x.k_offset : x.k_offset + CHUNK * x.k_row].reshape(CHUNK, x.k_row)
        keys: npt.NDArray[np.float32] = gguf.quants.dequantize(rows, kind).reshape(CHUNK, x.n_head_kv, x.head_k)
        return keys

    @property
    def query_shapes(self) -> list[tuple[int, int, int]]:
        """Per pooled layer (query_rows, n_head, head_k): the shapes of the captured queries."""
        return [(self.info.query_rows, layer.n_head, layer.head_k) for layer in self.layers]

    def read_queries(self, out: npt.NDArray[np.float32]) -> int:
        """Copy the newest queries of all layers to `out` (flat), behind the compute submitted so far.

        Returns the ticket. The query of position p is row p % query_rows of each layer.
        """
        ticket = int(lib.kvf_query_read(self._engine, ffi.from_buffer("float[]", out, require_writable=True)))
        assert ticket > 0, "queries are captured only where the pool was made with query_rows"
        return ticket

    def write_queries(self, rows: npt.NDArray[np.float32]) -> None:
        """Put back what `read_queries` has read."""
        _check(lib.kvf_query_write(self._engine, ffi.from_buffer("float[]", rows)))

    def index_size(self, units: Int32s) -> int:
        """Bytes of the index row of a chunk. units: the KV heads in it, (pooled layer, KV head) [n, 2], ascending."""
        size = int(lib.kvf_index_size(self._engine, len(units), _heads(units)))
        assert size > 0, f"no KV heads of the pooled layers, ascending: {units}"
        return size

    def build_index(self, units: Int32s, image: int, out: npt.NDArray[np.uint8]) -> None:
        """Fill `out` (shape [index_size]) with the keys of these KV heads in a page image, at 4 bits."""
        data = ffi.from_buffer("uint8_t[]", out, require_writable=True)
        _check(lib.kvf_index_build(self._engine, len(units), _heads(units), ffi.cast("uint8_t *", image), data))

    def score_index(
        self, units: Int32s, heads: Int32s, addresses: Addresses, rows: int, queries: npt.NDArray[np.float32],
        threads: int,
    ) -> npt.NDArray[np.float32]:  # fmt: skip
        """`score_keys` from the index rows at these addresses: `units` are those they were built for."""
        which = len(units), _heads(units)
        return self._score(lib.kvf_index_score, which, heads, addresses, rows, queries, threads)

    def score_keys(
        self, heads: Int32s, images: Addresses, rows: int, queries: npt.NDArray[np.float32], threads: int
    ) -> npt.NDArray[np.float32]:
        """Log of the attention mass per page image, before normalisation; shape [len(heads) * rows, n].

        heads: query heads, (pooled layer, head) [k, 2], ascending. queries: flat, per head [rows, head_k].
        """
        return self._score(lib.kvf_keys_score, (), heads, images, rows, queries, threads)

    def _score(
        self, call: Callable[..., int], which: Sequence[object], heads: Int32s, addresses: Addresses, rows: int,
        queries: npt.NDArray[np.float32], threads: int,
    ) -> npt.NDArray[np.float32]:  # fmt: skip
        out = np.empty((len(heads) * rows, len(addresses)), np.float32)
        chunks = ffi.from_buffer("uint64_t[]", np.ascontiguousarray(addresses, np.uint64))
        _check(call(self._engine, *which, len(heads), _heads(heads), len(addresses), chunks, rows,
                    ffi.from_buffer("float[]", queries), ffi.from_buffer("float[]", out), threads))  # fmt: skip
        return out

    def close(self) -> None:
        """Wait for all work and free the engine. The context stays."""
        if self._engine is not None:
            lib.kvf_close(self._engine)
            self._engine = None  # a call after this is a TypeError, not a crash

    @property
    def closed(self) -> bool:
        return self._engine is None

    def _read_info(self) -> EngineInfo:
        raw = ffi.new("kvf_info *")
        lib.kvf_get_info(self._engine, raw)
        return EngineInfo(
            n_slots=raw.n_slots,
            n_layers=raw.n_layers,
            n_pos=raw.n_pos,
            n_swa=raw.n_swa,
            recurrent=bool(raw.recurrent),
            alibi=bool(raw.alibi),
            mask_f32=bool(raw.mask_f32),
            v_trans=bool(raw.v_trans),
            query_rows=raw.query_rows,
            pinned=bool(raw.pinned),
            asynchronous=bool(getattr(raw, "async")),
            page_bytes=raw.page_bytes,
            device_bytes=raw.device_bytes,
            rotated=raw.rotated,
            type_k=ffi.string(raw.type_k).decode(),
            type_v=ffi.string(raw.type_v).decode(),
            device=ffi.string(raw.device).decode(),
        )

    def _read_layers(self) -> tuple[Layer, ...]:
        n = self.info.n_layers
        raw = ffi.new("kvf_layer[]", n)
        _check(lib.kvf_get_layers(self._engine, raw, n))
        return tuple(
            Layer(
                il=x.il,
                n_head=x.n_head,
                n_head_kv=x.n_head_kv,
                head_k=x.head_k,
                head_v=x.head_v,
                has_v=bool(x.has_v),
                k_offset=x.k_offset,
                k_row=x.k_row,
                v_offset=x.v_offset,
                v_row=x.v_row,
                scale=x.scale,
            )
            for x in raw
        )


def _heads(heads: Int32s) -> object:
    assert heads.ndim == 2
    assert heads.shape[1] == 2
    return ffi.from_buffer("kvf_head[]", np.ascontiguousarray(heads, np.int32))


def _check(code: int) -> None:
    """A call that cannot fail unless this package is wrong has failed."""
    if code != 0:
        raise AssertionError(f"the native engine refused a call with code {code}")
