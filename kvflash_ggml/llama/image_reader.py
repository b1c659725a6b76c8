"""Images and sounds of requests: read on the thread of the request, and encoded on the thread of the engine."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..arrays import Floats
from ..errors import HostMemoryError
from ..media.files import MediaLimits
from ..media.rows import LIMIT, Medium
from . import vision

if TYPE_CHECKING:
    import llama_cpp

    from ..runtime.text import Text

KNOWN = 256
"""Images and sounds whose tokens are known: each turn of a chat sends them again."""


HELD = 1 << 30
"""Bytes of all media of requests that wait or run: the files, and what their projector has made of them."""

LENT = LIMIT
"""Bytes of embeddings that requests keep which wait, though their pool may drop them. Beyond it, an image whose
embeddings were dropped is decoded again while all requests wait."""

_EACH = 16 << 10
"""Of a row, about, as pixels or frequencies in single precision."""


@dataclass(frozen=True, slots=True)
class _Told:
    """tokens: of the image or sound and of the marks around it. parts: that are encoded."""

    tokens: tuple[int, ...]
    parts: tuple[Medium, ...]


class _Chunks:
    """Owns chunks of libmtmd: they are freed with it."""

    def __init__(self, mtmd: Any, chunks: Any) -> None:
        weakref.finalize(self, mtmd.mtmd_input_chunks_free, chunks)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of an image or a sound that is encoded by itself, in the chunks of its owner."""

    chunk: Any
    owner: _Chunks


class PreparedImage:
    """An image or a sound of a request. tokens: what stands for it in the prompt, with the marks that its projector
    wants. freed: called when its pixels have been let go of.
    """

    freed: Callable[[], object]

    def __init__(
        self, split: Callable[[], tuple[_Told, list[_Part]]], encoder: vision.Encoder, told: _Told, parts: list[_Part],
        rows: list[Floats],
    ) -> None:  # fmt: skip
        self.tokens = told.tokens
        self._split, self._encoder, self._media = split, encoder, told.parts
        self._parts, self._left, self._rows = parts, len(told.parts), rows

    def load(self) -> None:
        """Have its rows known to the steps that come, on the engine's thread. They are encoded when a step reads them,
        unless the request has ended.
        """
        image = weakref.ref(self)
        for i, medium in enumerate(self._media):
            self._encoder.media.expect(medium, partial(_encoded, image, i))

    def encode(self, i: int) -> Floats:
        """Return the embeddings of a part. DecodeError if its encoder fails."""
        if self._rows:
            return self._rows[i]
        parts = self._parts or self._split()[1]  # dropped since it was read
        made = self._encoder.encode(parts[i].chunk, len(self._media[i].numbers))
        self._left -= 1
        if self._left <= 0:  # its pixels are of no further use
            self._parts = []
            self.freed()
        return made


def _encoded(image: Callable[[], PreparedImage | None], i: int) -> Floats | None:
    found = image()
    return None if found is None else found.encode(i)


class ImageReader:
    """Reads files of images and sound for a model. Arguments: see `vision.Encoder`."""

    def __init__(self, llm: llama_cpp.Llama, text: Text, lock: threading.RLock) -> None:
        self.encoder = vision.Encoder(llm, text, lock)
        self._held = self._lent = 0
        self._known: OrderedDict[str, _Told] = OrderedDict()
        self._lock = threading.RLock()  # the garbage collector may let one go that reads another

    def read(self, data: bytes, limits: MediaLimits, salt: str = "") -> PreparedImage:
        """Read the image or sound in a file, from any thread. salt: what is kept of it is for requests of this salt.

        ConfigError for a file that is none or is too large, however hostile it is, for one that the projector does not
        take, and for one that a pool cannot place. HostMemoryError while requests hold too many.
        """
        name = vision.name_of(data, salt)
        split = partial(self.split, data, limits, name)
        with self._lock:
            told = self._known.get(name)
        parts: list[_Part] = []
        kept = [] if told is None else [self.encoder.media.kept(medium.key) for medium in told.parts]
        rows = [found for found in kept if found is not None]
        if told is None or len(rows) < len(kept):
            rows = []
            told, parts = split()  # here, and not where all requests wait for it
        size, lent = len(data) + _EACH * len(told.tokens) * bool(parts), sum(found.nbytes for found in rows)
        with self._lock:
            self._known[name] = told
            self._known.move_to_end(name)
            while len(self._known) > KNOWN:
                self._known.popitem(last=False)
            if self._held + size > HELD:
                raise HostMemoryError(
                    f"requests hold images and sound of {self._held} bytes, and {HELD} is the most: try again when one "
                    "has ended"
                )
            if self._lent + lent > LENT:
                rows, lent = [], 0
            self._held += size
            self._lent += lent
        image = PreparedImage(split, self.encoder, told, parts, rows)
        weakref.finalize(image, self._let_go, len(data), lent)
        image.freed = weakref.finalize(image, self._let_go, size - len(data))  # is called once
        return image

    def _let_go(self, size: int, lent: int = 0) -> None:
        with self._lock:
            self._held -= size
            self._lent -= lent

    def split(self, data: bytes, limits: MediaLimits, name: str) -> tuple[_Told, list[_Part]]:
        """Return what stands for an image or a sound of this name, and its parts to encode. Raises as `read`."""
        encoder = self.encoder
        mtmd = encoder.mtmd
        bitmap = encoder.bitmap(data, limits, name)
        try:
            chunks = mtmd.mtmd_input_chunks_init()
            owner = _Chunks(mtmd, chunks)
            text = mtmd.mtmd_input_text()
            text.text = mtmd.mtmd_default_marker()
            text.text_len, text.add_special, text.parse_special = len(text.text), False, True
            bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
            encoder.cut(chunks, ctypes.byref(text), bitmaps, f"an image or a sound of {len(data)} bytes")
        finally:
            mtmd.mtmd_bitmap_free(bitmap)
        tokens: list[int] = []
        told: list[Medium] = []
        parts: list[_Part] = []
        for i in range(mtmd.mtmd_input_chunks_size(chunks)):
            chunk = mtmd.mtmd_input_chunks_get(chunks, i)
            if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
                count = ctypes.c_size_t()
                found = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
                tokens += found[: count.value]
                continue
            told.append(encoder.medium(chunk, len(told) + 1))
            parts.append(_Part(chunk, owner))
            tokens += told[-1].numbers.tolist()
        return _Told(tuple(tokens), tuple(told)), parts
