"""Upstream's chat handlers of images and sound on a pool: each is encoded once, and its rows are read once."""

from __future__ import annotations

import copy
import ctypes
import hashlib
import mmap
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
from jinja2 import pass_context
from llama_cpp._logger import llama_log_callback
from llama_cpp.llama_chat_format import Llava15ChatHandler, MTMDChatHandler

from ..arrays import Floats, Int32s
from ..config import NGRAM
from ..errors import ConfigError, DecodeError
from ..gguf import purpose
from ..media.rows import MOST, MediaRows, Medium, numbers_of
from ..native.guard import guarded, reason
from ..placement import memory
from .formatting import rendered, takes_parts

if TYPE_CHECKING:
    from ..media.files import MediaLimits
    from ..runtime.text import Text

HANDLERS = (Llava15ChatHandler, MTMDChatHandler)
"""Upstream's classes that evaluate images by `libmtmd`; the others are made of them."""

COMPUTE_BYTES = 512 << 20
"""Of memory that a projector computes with: 8,000 patches of a photo take about as much."""


_BOUNDED = "kvflash_rendered"
"""The name of the function that renders the model's template, among the variables of the one that upstream compiles."""


class Bounded(MTMDChatHandler):
    """Upstream's handler that makes prompts by the model's own chat template, which the library renders."""

    def __call__(self, *, llama: Any, messages: Any, **settings: Any) -> Any:
        """As upstream."""
        source = super()._get_chat_template(llama)
        settings[_BOUNDED] = pass_context(lambda context: rendered(source, context.get_all()))
        return super().__call__(llama=llama, messages=messages, **settings)

    def _get_chat_template(self, llama_model: Any) -> str:
        """Return a template for upstream to compile that has the model's own rendered within bounds."""
        self._takes_parts = takes_parts(super()._get_chat_template(llama_model))
        return f"{{{{ {_BOUNDED}() }}}}"

    def _get_template_messages(self, messages: list[Any], media_marker: str) -> list[Any]:
        """As upstream; one text for each message where the template knows no parts."""
        made = super()._get_template_messages(messages, media_marker)
        if not self._takes_parts:
            for message in made:
                if isinstance(message.get("content"), list):
                    message["content"] = "".join(part.get("text", "") for part in message["content"])
        return made


class Projector(Bounded):
    """The handler of `mmproj=`.

    ConfigError for a file that is no projector. It can be pickled, as `Llama` is.
    """

    def __init__(self, path: Path) -> None:
        purpose.check_projector(path)
        super().__init__(clip_model_path=str(path), verbose=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Projector, (Path(self.clip_model_path),)

    def __call__(self, *, llama: Any, messages: Sequence[Any], **settings: Any) -> Any:
        """As upstream; sound (`input_audio`) goes its way as a data URL, as images do."""
        return super().__call__(llama=llama, messages=[_with_urls(message) for message in messages], **settings)

    def _init_mtmd_context(self, llama_model: Any) -> None:
        _log_as_upstream(self)
        try:
            with guarded(f"mmproj (--mmproj) {self.clip_model_path}"):
                super()._init_mtmd_context(llama_model)
        except ConfigError:
            raise
        except ValueError as err:
            if self.mtmd_ctx is not None:  # upstream leaves one behind that sees no images
                llama_model._stack.callback(self._close)
                return
            raise ConfigError(
                f"mmproj (--mmproj) {self.clip_model_path} is no projector for this model: give the file that was made "
                f"beside the model's ({err})"
            ) from err

    def _close(self) -> None:
        if self.mtmd_ctx is not None:
            self._mtmd_cpp.mtmd_free(self.mtmd_ctx)
            self.mtmd_ctx = None


def _with_urls(message: Any) -> Any:
    """Return a message with its sound as upstream's handlers take images. ConfigError for a part without data."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = list(content)
    for i, part in enumerate(parts):
        if isinstance(part, dict) and part.get("type") == "input_audio":
            sound = part.get("input_audio")
            data = sound.get("data") if isinstance(sound, dict) else None
            if not isinstance(data, str):
                raise ConfigError('a part input_audio has no sound: {"data": BASE64, "format": "wav"} is expected')
            parts[i] = {"type": "image_url", "image_url": {"url": f"data:audio;base64,{data}"}}
    return {**message, "content": parts}


def open_projector(llm: llama_cpp.Llama, handler: object, known: dict[str, int]) -> None:
    """Load the projector of a model that has just been loaded, before a pool takes what memory is left.

    handler: of the model's chats; nothing is done unless it is a `Projector`. known: bytes of devices, by name, that
    were free before: what the projector takes is subtracted. ConfigError if it is none of this model.
    """
    if not isinstance(handler, Projector):
        return
    before = {device.name: device.free for device in memory.devices()} if known else {}
    handler._init_mtmd_context(llm)
    for device in memory.devices() if known else ():
        if device.name in known:  # what the projector took is not lost
            known[device.name] -= before[device.name] - device.free


def prepare(handler: Any) -> None:
    """Check the projector file of one of the `HANDLERS`, as `purpose.check_projector`, before it is loaded.

    From then on a handler of upstream's own classes renders the template of a model file within bounds.
    """
    if handler.mtmd_ctx is None:
        purpose.check_projector(Path(handler.clip_model_path), "clip_model_path")
    kind = type(handler)
    if isinstance(handler, MTMDChatHandler) and kind.__module__ == MTMDChatHandler.__module__:
        handler.__class__ = type(kind.__name__, (Bounded, kind), {})


def reserve_bytes(handler: Any) -> int:
    """Estimate the memory that a chat handler's projector will take on the first device: its weights, and what they
    compute with, which it takes as images need it. 0 for a handler without one, and no weights of one that is loaded.
    """
    if not isinstance(handler, HANDLERS):
        return 0
    return COMPUTE_BYTES + (Path(handler.clip_model_path).stat().st_size if handler.mtmd_ctx is None else 0)


def answer(llm: llama_cpp.Llama, made: Text, lock: threading.RLock, **settings: Any) -> Any:
    """What `create_chat_completion` of a Llama with one of the `HANDLERS` and a pool returns.

    The handler collects its prompt in a `Seat`, where upstream would evaluate it after it has cleared the cache. The
    prompt is then read like any other: from where it differs from the text at hand. ConfigError for a projector whose
    rows a pool cannot place, and where something drafts. made, lock: see `Encoder`.
    """
    seat: Any = Seat(llm, made, lock)
    return llama_cpp.Llama.create_chat_completion(seat, **settings)


def name_of(data: bytes, salt: str = "") -> str:
    """Name a file by its bytes and the salt of its request: nothing that is kept of it is shared between salts."""
    name = hashlib.sha256(data).hexdigest()
    return hashlib.sha256((name + salt).encode()).hexdigest() if salt else name


class Encoder:
    """A model's projector: what media become in its pool.

    llm: a `Llama` with one of the `HANDLERS` and a pool. text: at hand in it. lock: that its calls hold. mtmd:
    `llama_cpp.mtmd_cpp`; context: its context for this model; media: the embeddings that the pool keeps; sees, hears:
    does it take images and sound? ConfigError where something drafts, and for a projector that is none of this model.
    """

    def __init__(self, llm: llama_cpp.Llama, text: Text, lock: threading.RLock) -> None:
        handler: Any = llm.chat_handler
        sequence, speculator = text.pooled, text.speculator
        pool, config = sequence.pool, sequence.config
        if speculator is not None and (speculator.types != (NGRAM,) or config.pool_drafts):
            raise ConfigError(
                f"drafts by {', '.join(speculator.types)} beside a chat handler for images, with answers "
                f"{config.answer!r}: only kvflash_spec='ngram' drafts in texts with images, and not for answers that "
                "the whole text verifies"
            )
        self._lock = lock
        with self._lock:
            prepare(handler)
            with guarded(f"clip_model_path {handler.clip_model_path}"):
                handler._init_mtmd_context(llm)
            _log_as_upstream(handler)
            self._digest = _digest(handler)
        self.mtmd, self.context = handler._mtmd_cpp, handler.mtmd_ctx
        self.sees = bool(self.mtmd.mtmd_support_vision(self.context))
        self.hears = bool(self.mtmd.mtmd_support_audio(self.context))
        self._name = handler.clip_model_path
        self.media: MediaRows = pool.media
        self._width = pool.engine.info.n_embd
        self._alibi, self._step = pool.engine.info.alibi, min(pool.n_ubatch, sequence.n_batch)

    def bitmap(self, data: bytes, limits: MediaLimits | None = None, name: str | None = None) -> Any:
        """A file as a bitmap of libmtmd, to be freed. name: of its chunks, see `name_of`; None: by its bytes alone.

        ConfigError for a file that cannot be read or is too large, however hostile it is, and for one of a kind that
        the projector does not take.
        """
        from ..media import files

        mtmd, sound = self.mtmd, files.is_sound(data)
        if not (self.hears if sound else self.sees):
            kind, other = ("sound", "an audio") if sound else ("images", "a vision")
            raise ConfigError(f"the projector {self._name} takes no {kind}: load one with {other} encoder")
        rate = mtmd.mtmd_get_audio_sample_rate(self.context) if sound else 0
        found = files.decode(data, mtmd._libmtmd._name, limits=limits, rate=rate)
        if isinstance(found, files.Sound):
            bitmap = mtmd.mtmd_bitmap_init_from_audio(found.count, _array(ctypes.c_float, found.data))
        else:
            bitmap = mtmd.mtmd_bitmap_init(found.width, found.height, _array(ctypes.c_uint8, found.data))
        mtmd.mtmd_bitmap_set_id(bitmap, (name or name_of(data)).encode())
        return bitmap

    def cut(self, chunks: Any, text: Any, bitmaps: Any, what: str) -> None:
        """Cut a text with media into chunks, as `mtmd_tokenize`. ConfigError if the projector cannot take `what`."""
        reason()  # of an earlier call
        if code := self.mtmd.mtmd_tokenize(self.context, chunks, text, bitmaps, len(bitmaps)):
            raise ConfigError(
                f"the projector {self._name} cannot take {what} ({reason() or code}): send another size, or convert "
                "the projector again"
            )

    def medium(self, chunk: Any, part: int) -> Medium:
        """What stands for an image or a sound, or a part of one. part: its number, of one that is cut in several.

        ConfigError for what a pool cannot place.
        """
        axes, size = None, self.mtmd.mtmd_input_chunk_get_n_pos(chunk)
        image = self.mtmd.mtmd_input_chunk_get_type(chunk) == self.mtmd.MTMD_INPUT_CHUNK_TYPE_IMAGE
        if image and self.mtmd.mtmd_decode_use_mrope(self.context):  # rows of sound have the positions of tokens
            axes = self._axes(chunk)
        count = self.mtmd.mtmd_input_chunk_get_n_tokens(chunk)
        mutual = bool(self.mtmd.mtmd_decode_use_non_causal(self.context, chunk))
        if mutual:
            self._check_span(count, alone=axes is None)
        place = b"" if axes is None else axes.tobytes()
        name = hashlib.sha256(self.mtmd.mtmd_input_chunk_get_id(chunk) or b"").digest()
        key = hashlib.sha256(self._digest + name + part.to_bytes(8, "little") + place).digest()
        advances = None if axes is None else np.diff(axes[0], append=np.int32(size))
        return Medium(key, numbers_of(key, count, advances, mutual=mutual), axes)

    def _check_span(self, rows: int, *, alone: bool) -> None:
        """Raise ConfigError if a pool cannot read so many rows that see each other. alone: none share a position."""
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

    def encode(self, chunk: Any, count: int) -> Floats:
        """Return the embeddings of a chunk of so many rows, [count, width]. DecodeError if its encoder fails."""
        with self._lock:
            reason()  # of an earlier call
            code = self.mtmd.mtmd_encode_chunk(self.context, chunk)
            if code:
                raise DecodeError(
                    f"the projector {self._name} cannot encode an image or a sound of {count} rows "
                    f"({reason() or code}): send another size, or convert the projector again"
                )
            data = self.mtmd.mtmd_get_output_embd(self.context)
            made: Floats = np.ctypeslib.as_array(data, shape=(count, self._width)).copy()
        return made


class Seat:
    """What a handler sees of a `Llama` while it makes a prompt. All else is that of the model."""

    def __init__(self, llm: llama_cpp.Llama, text: Text, lock: threading.RLock) -> None:
        encoder = Encoder(llm, text, lock)
        self._llm, self._model = llm, text.model
        handler: Any = copy.copy(llm.chat_handler)  # the model's own stays as upstream made it
        handler._mtmd_cpp = _Mtmd(encoder, self)
        self.chat_handler = handler
        self.media = encoder.media
        self.reset()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    @property
    def _ctx(self) -> Any:
        return _Uncleared(self._model.context)

    def reset(self) -> None:
        """Begin a prompt. The text of the model stays."""
        self.n_tokens = 0
        self.input_ids = np.zeros(self._llm.n_ctx(), np.intc)
        self.media.begin()

    def eval(self, tokens: Any) -> None:
        """Add tokens, or numbers of media rows, to the prompt."""
        self.input_ids[self.n_tokens : self.n_tokens + len(tokens)] = tokens
        self.n_tokens += len(tokens)


class _Chunk:
    """A copy of a chunk of libmtmd, freed with this."""

    def __init__(self, encoder: Encoder, chunk: Any, count: int) -> None:
        self._encoder, self._count = encoder, count
        self._chunk = encoder.mtmd.mtmd_input_chunk_copy(chunk)
        weakref.finalize(self, encoder.mtmd.mtmd_input_chunk_free, self._chunk)

    def encode(self) -> Floats:
        """See `MediaRows.expect`."""
        return self._encoder.encode(self._chunk, self._count)


def _array(kind: Any, data: bytes) -> Any:
    return (kind * (len(data) // ctypes.sizeof(kind))).from_buffer_copy(data)


class _Uncleared:
    """A context whose memory a handler cannot clear."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def kv_cache_clear(self) -> None:
        """Do nothing: the text at hand is what the prompt is compared with."""


class _Mtmd:
    """`llama_cpp.mtmd_cpp` for one prompt: media are known by their bytes, and evaluated by the pool."""

    def __init__(self, encoder: Encoder, seat: Seat) -> None:
        self._stock = encoder.mtmd
        self._encoder = encoder
        self._seat = seat
        self._parts: Counter[bytes] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def mtmd_helper_bitmap_init_from_buf(self, ctx: Any, data: Any, *rest: Any) -> Any:
        """As upstream, but for where the file is decoded. ConfigError if it cannot be."""
        return self._encoder.bitmap(bytes(data))

    def mtmd_tokenize(self, ctx: Any, chunks: Any, text: Any, bitmaps: Any, count: int) -> int:
        """As upstream. ConfigError for what the projector cannot take."""
        self._encoder.cut(chunks, text, bitmaps, f"{count} images or sounds")
        return 0

    def mtmd_helper_eval_chunk_single(
        self, ctx: Any, context: Any, chunk: Any, n_past: Any, seq: Any, n_batch: int, last: bool, new_n_past: Any
    ) -> int:
        """Add an image or a sound, or a part of one, to the prompt; 0. It is encoded when the pool reads it."""
        name = self._stock.mtmd_input_chunk_get_id(chunk) or b""
        self._parts[name] += 1
        medium = self._encoder.medium(chunk, self._parts[name])
        media = self._encoder.media
        kept = media.kept(medium.key) is not None
        media.expect(medium, None if kept else _Chunk(self._encoder, chunk, len(medium.numbers)).encode)
        self._seat.eval(medium.numbers)
        new_n_past._obj.value = self._seat.n_tokens
        return 0


def _log_as_upstream(handler: Any) -> None:
    """What libmtmd logs goes where the rest of llama.cpp's log goes: nowhere unless `verbose`."""
    handler._mtmd_cpp.mtmd_helper_log_set(llama_log_callback, None)


def _digest(handler: Any) -> bytes:
    """Return the SHA-256 of a handler's projector file, which is read once."""
    known: bytes | None = getattr(handler, "_kvflash_digest", None)
    if known is None:
        with (
            Path(handler.clip_model_path).open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            known = handler._kvflash_digest = hashlib.sha256(data).digest()
    return known
