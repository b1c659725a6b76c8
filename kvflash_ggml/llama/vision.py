"""Upstream's vision chat handlers on a pool: an image is encoded once, and its rows are read once."""

from __future__ import annotations

import copy
import ctypes
import hashlib
import mmap
import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp._logger import llama_log_callback
from llama_cpp.llama_chat_format import Llava15ChatHandler, MTMDChatHandler

from ..arrays import Floats, Int32s
from ..errors import ConfigError, DecodeError
from ..gguf import purpose
from ..media import images
from ..media.rows import MOST, MediaRows, numbers_of
from ..placement import memory
from ..spec.find import NGRAM

HANDLERS = (Llava15ChatHandler, MTMDChatHandler)
"""Upstream's classes that evaluate images by `libmtmd`; the others are made of them."""

COMPUTE_BYTES = 512 << 20
"""Of memory that a projector computes with: 8,000 patches of a photo take about as much."""


_PARTS = re.compile(r"for\s+\w+\s+in\s+[\w.'\"\[\]]*content")
"""In a chat template that goes through the parts of a message."""


class Projector(MTMDChatHandler):
    """The handler of `mmproj=`: upstream's that makes prompts by the model's own chat template.

    ConfigError for a file that is no projector. It can be pickled, as `Llama` is.
    """

    def __init__(self, path: Path) -> None:
        purpose.check_projector(path)
        super().__init__(clip_model_path=str(path), verbose=False)
        self._takes_parts = True

    def __reduce__(self) -> tuple[Any, ...]:
        return Projector, (Path(self.clip_model_path),)

    def _get_chat_template(self, llama_model: Any) -> str:
        template: str = super()._get_chat_template(llama_model)
        self._takes_parts = _PARTS.search(template) is not None
        return template

    def _get_template_messages(self, messages: list[Any], media_marker: str) -> list[Any]:
        """As upstream; one text for each message where the template knows no parts."""
        made = super()._get_template_messages(messages, media_marker)
        if not self._takes_parts:
            for message in made:
                if isinstance(message.get("content"), list):
                    message["content"] = "".join(part.get("text", "") for part in message["content"])
        return made

    def _init_mtmd_context(self, llama_model: Any) -> None:
        _log_as_upstream(self)
        try:
            super()._init_mtmd_context(llama_model)
        except ValueError as err:
            if self.mtmd_ctx is not None:  # upstream leaves it behind
                self._mtmd_cpp.mtmd_free(self.mtmd_ctx)
                self.mtmd_ctx = None
            raise ConfigError(
                f"mmproj (--mmproj) {self.clip_model_path} is no projector of images for this model: give the file "
                f"that was made beside the model's ({err})"
            ) from err


def open_projector(llm: Any, handler: Any) -> None:
    """Load the projector of a model that has just been loaded, before a pool takes what memory is left.

    handler: of the model's chats; nothing is done unless it is a `Projector`. ConfigError if it is none of this model.
    """
    if not isinstance(handler, Projector):
        return
    known: dict[str, int] = llm._free_before
    before = {device.name: device.free for device in memory.devices()} if known else {}
    handler._init_mtmd_context(llm)
    for device in memory.devices() if known else ():
        if device.name in known:  # what the projector took is not lost
            known[device.name] -= before[device.name] - device.free


def reserve_bytes(handler: Any) -> int:
    """Memory of the first device that the projector of a chat handler will take, roughly: its weights, and what they
    compute with. 0 for a handler without one, and for one that is loaded.
    """
    if not isinstance(handler, HANDLERS) or handler.mtmd_ctx is not None:
        return 0
    return Path(handler.clip_model_path).stat().st_size + COMPUTE_BYTES


def answer(llm: Any, *args: Any, **settings: Any) -> Any:
    """What `create_chat_completion` of a Llama with one of the `HANDLERS` and a pool returns.

    The handler collects its prompt in a `Seat`, where upstream would evaluate it after it has cleared the cache. The
    prompt is then read like any other: from where it differs from the text at hand. ConfigError for a projector whose
    rows a pool cannot place, and where something drafts.
    """
    seat: Any = Seat(llm)
    return llama_cpp.Llama.create_chat_completion(seat, *args, **settings)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of an image, or of a part of one, before they are encoded.

    key: names it beside others. numbers: stand for its rows in a text, [rows]. axes, size, mutual: see `MediaRows.add`.
    """

    key: bytes
    numbers: Int32s
    axes: Int32s | None
    size: int
    mutual: bool


class Encoder:
    """A model's projector: what images become in its pool. llm: a `Llama` with one of the `HANDLERS` and a pool.

    mtmd: `llama_cpp.mtmd_cpp`; context: its context for this model; media: the embeddings that the pool keeps.
    ConfigError where something drafts, and for a projector that is none of this model.
    """

    def __init__(self, llm: Any) -> None:
        handler, sequence = llm.chat_handler, llm._reader.sequence
        pool = sequence.pool
        speculator = llm._reader.speculator
        if speculator is not None and (speculator.types != (NGRAM,) or llm._config.answer == "lossless"):
            raise ConfigError(
                f"drafts by {', '.join(speculator.types)} beside a chat handler for images, with answers "
                f"{llm._config.answer!r}: only kvflash_spec='ngram' drafts in texts with images, and not for lossless "
                "answers"
            )
        self._lock = llm._call_lock.lock
        with self._lock:
            handler._init_mtmd_context(llm)
            _log_as_upstream(handler)
            self._digest = _digest(handler)
        self.mtmd, self.context = handler._mtmd_cpp, handler.mtmd_ctx
        self.media: MediaRows = pool.media
        self._width = pool.engine.info.n_embd
        self._alibi, self._step = pool.engine.info.alibi, min(pool.n_ubatch, sequence.n_batch)

    def rows(self, chunk: Any, part: int) -> Rows:
        """What stands for an image, or a part of one. part: its number, of an image that is cut in several.

        ConfigError for what a pool cannot place.
        """
        if self.mtmd.mtmd_input_chunk_get_type(chunk) != self.mtmd.MTMD_INPUT_CHUNK_TYPE_IMAGE:
            raise ConfigError("audio in a pool is not served yet: use kvflash=None")
        axes, size = None, self.mtmd.mtmd_input_chunk_get_n_pos(chunk)
        if self.mtmd.mtmd_decode_use_mrope(self.context):
            axes = self._axes(chunk)
        count = self.mtmd.mtmd_input_chunk_get_n_tokens(chunk)
        mutual = bool(self.mtmd.mtmd_decode_use_non_causal(self.context, chunk))
        if mutual:
            self._check_span(count, alone=axes is None)
        place = b"" if axes is None else axes.tobytes()
        name = hashlib.sha256(self.mtmd.mtmd_input_chunk_get_id(chunk) or b"").digest()
        key = hashlib.sha256(self._digest + name + part.to_bytes(8, "little") + place).digest()
        advances = None if axes is None else np.diff(axes[0], append=np.int32(size))
        return Rows(key, numbers_of(key, count, advances, mutual=mutual), axes, size, mutual)

    def _check_span(self, rows: int, *, alone: bool) -> None:
        """ConfigError if a pool cannot read so many rows that see each other. alone: none share a position."""
        if self._alibi or not alone:
            raise ConfigError("images whose rows see each other, of a model with ALiBi or M-RoPE: use kvflash=None")
        if rows > self._step:
            raise ConfigError(
                f"an image of {rows} rows that see each other is read in one step, and a step has {self._step}: "
                f"n_ubatch and n_batch must be at least {rows}"
            )

    def _axes(self, chunk: Any) -> Int32s:
        """The positions of a chunk's rows, see `Part`. ConfigError if its rows would be hidden otherwise.

        Upstream hides a row of the same time from rows with a lesser (y, x). The pool hides rows that come later.
        """
        image = self.mtmd.mtmd_input_chunk_get_tokens_image(chunk)
        count = self.mtmd.mtmd_input_chunk_get_n_tokens(chunk)
        at = []
        for first in (0, 1):
            out = (self.mtmd.mtmd_decoder_pos * count)()
            self.mtmd.mtmd_helper_image_get_decoder_pos(image, first, out)
            at.append(np.array([(pos.t, pos.y, pos.x, pos.z) for pos in out], np.int32))
        size = self.mtmd.mtmd_input_chunk_get_n_pos(chunk)
        steps = np.diff(at[0][:, 0], append=size)
        ascending = all(a < b for a, b in pairwise(map(tuple, at[0][:, :3].tolist())))
        moves = np.array_equal(at[1] - at[0], np.broadcast_to([1, 1, 1, 0], at[0].shape))
        if not (ascending and moves and at[0][0, 0] == 0 and 0 <= steps.min() <= steps.max() <= MOST and size <= count):
            raise ConfigError(
                f"an image of {count} rows with positions that a pool does not know (as of HunyuanVL): use kvflash=None"
            )
        return np.ascontiguousarray(at[0].T)

    def load(self, rows: Rows, chunk: Any) -> None:
        """Have the embeddings of a chunk kept: the encoder runs unless they are. DecodeError if it fails."""
        if self.media.find(rows.key) is not None:
            return
        count = len(rows.numbers)
        with self._lock:
            code = self.mtmd.mtmd_encode_chunk(self.context, chunk)
            if code:
                raise DecodeError(f"the image encoder answered {code} for an image of {count} rows")
            data = self.mtmd.mtmd_get_output_embd(self.context)
            made: Floats = np.ctypeslib.as_array(data, shape=(count, self._width)).copy()
        self.media.add(rows.key, made, rows.axes, rows.size, mutual=rows.mutual)


class Seat:
    """What a handler sees of a `Llama` while it makes a prompt. All else is that of the model."""

    def __init__(self, llm: Any) -> None:
        encoder = Encoder(llm)
        self._llm = llm
        self.chat_handler = copy.copy(llm.chat_handler)  # the model's own stays as upstream made it
        self.chat_handler._mtmd_cpp = _Mtmd(encoder, self)
        self.media = encoder.media
        self.reset()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    @property
    def _ctx(self) -> Any:
        return _Uncleared(self._llm._ctx)

    def reset(self) -> None:
        """Begin a prompt. The text of the model stays."""
        self.n_tokens = 0
        self.input_ids = np.zeros(self._llm.n_ctx(), np.intc)
        self.media.begin()

    def eval(self, tokens: Any) -> None:
        """Add tokens, or numbers of media rows, to the prompt."""
        self.input_ids[self.n_tokens : self.n_tokens + len(tokens)] = tokens
        self.n_tokens += len(tokens)


def bitmap_of(mtmd: Any, data: bytes, most: int = images.MOST_PIXELS) -> Any:
    """An image file as a bitmap of libmtmd, to be freed. It is named by its bytes, and its chunks will be by it.

    mtmd: `llama_cpp.mtmd_cpp`. most: pixels. ConfigError for a file that is no image or is too large, however hostile
    it is.
    """
    pixels = images.decode(data, mtmd._libmtmd._name, most=most)
    bitmap = mtmd.mtmd_bitmap_init(
        pixels.width, pixels.height, (ctypes.c_uint8 * len(pixels.data)).from_buffer_copy(pixels.data)
    )
    mtmd.mtmd_bitmap_set_id(bitmap, hashlib.sha256(data).hexdigest().encode())
    return bitmap


class _Uncleared:
    """A context whose memory a handler cannot clear."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def kv_cache_clear(self) -> None:
        """Nothing: the text at hand is what the prompt is compared with."""


class _Mtmd:
    """`llama_cpp.mtmd_cpp` for one prompt: images are known by their bytes, and evaluated by the pool."""

    def __init__(self, encoder: Encoder, seat: Seat) -> None:
        self._stock = encoder.mtmd
        self._encoder = encoder
        self._seat = seat
        self._parts: Counter[bytes] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def mtmd_helper_bitmap_init_from_buf(self, ctx: Any, data: Any, *rest: Any) -> Any:
        """As upstream, but for where the image is decoded. ConfigError if it cannot be."""
        return bitmap_of(self._stock, bytes(data))

    def mtmd_helper_eval_chunk_single(
        self, ctx: Any, context: Any, chunk: Any, n_past: Any, seq: Any, n_batch: int, last: bool, new_n_past: Any
    ) -> int:
        """Add an image, or a part of one, to the prompt; 0. Its encoder runs unless its embeddings are kept."""
        name = self._stock.mtmd_input_chunk_get_id(chunk) or b""
        self._parts[name] += 1
        rows = self._encoder.rows(chunk, self._parts[name])
        self._encoder.load(rows, chunk)
        self._seat.eval(rows.numbers)
        new_n_past._obj.value = self._seat.n_tokens
        return 0


def _log_as_upstream(handler: Any) -> None:
    """What libmtmd logs goes where the rest of llama.cpp's log goes: nowhere unless `verbose`."""
    handler._mtmd_cpp.mtmd_helper_log_set(llama_log_callback, None)


def _digest(handler: Any) -> bytes:
    """SHA-256 of a handler's projector file, which is read once."""
    known: bytes | None = getattr(handler, "_kvflash_digest", None)
    if known is None:
        with (
            Path(handler.clip_model_path).open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            known = handler._kvflash_digest = hashlib.sha256(data).digest()
    return known
