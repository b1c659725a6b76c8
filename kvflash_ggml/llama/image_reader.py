"""Images of requests: read on the thread of the request, and encoded on the thread of the engine."""

from __future__ import annotations

import ctypes
import hashlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, HostMemoryError
from ..media.images import MOST_PIXELS
from . import vision

KNOWN = 256
"""Images whose tokens are known: each turn of a chat sends its images again."""


HELD = 1 << 30
"""Bytes of all images of requests that wait or run: the files, and what their projector has made of them."""

_EACH = 16 << 10
"""Of a row, about, as pixels in single precision."""


@dataclass(frozen=True, slots=True)
class _Told:
    """tokens: of the image and of the marks around it. parts: that are encoded."""

    tokens: tuple[int, ...]
    parts: tuple[vision.Rows, ...]


class _Chunks:
    """Owns chunks of libmtmd: they are freed with it."""

    def __init__(self, mtmd: Any, chunks: Any) -> None:
        weakref.finalize(self, mtmd.mtmd_input_chunks_free, chunks)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of an image that is encoded by itself, in the chunks of its owner."""

    chunk: Any
    owner: _Chunks


class Image:
    """An image of a request. tokens: what stands for it in the prompt, with the marks that its projector wants. freed:
    called when its pixels have been let go of.
    """

    freed: Callable[[], object]

    def __init__(self, reader: ImageReader, data: bytes, most: int, told: _Told, parts: list[_Part]) -> None:
        self.tokens = told.tokens
        self._reader, self._data, self._most, self._rows, self._parts = reader, data, most, told.parts, parts

    def load(self) -> None:
        """Have its embeddings kept for the steps that come, on the engine's thread. The encoder runs unless they are.

        DecodeError if it fails.
        """
        encoder = self._reader.encoder
        if any(encoder.media.find(rows.key) is None for rows in self._rows):
            parts = self._parts or self._reader.split(self._data, self._most)[1]
            for rows, part in zip(self._rows, parts, strict=True):
                encoder.load(rows, part.chunk)
        self._parts = []  # its pixels are of no further use
        self.freed()


class ImageReader:
    """Reads image files for a model. llm: a `Llama` with a projector and a pool; nothing drafts for it."""

    def __init__(self, llm: Any) -> None:
        self.encoder = vision.Encoder(llm)
        self._held = 0
        self._known: OrderedDict[bytes, _Told] = OrderedDict()
        self._lock = threading.RLock()  # the garbage collector may let one go that reads another

    def read(self, data: bytes, *, most: int = MOST_PIXELS) -> Image:
        """The image in a file, from any thread. most: pixels.

        ConfigError for a file that is no image or is too large, however hostile it is, and for an image that a pool
        cannot place. HostMemoryError while requests hold too many.
        """
        name = hashlib.sha256(data).digest()
        with self._lock:
            told = self._known.get(name)
        parts: list[_Part] = []
        if told is None:
            told, parts = self.split(data, most)
        size = len(data) + _EACH * len(told.tokens) * bool(parts)
        with self._lock:
            self._known[name] = told
            self._known.move_to_end(name)
            while len(self._known) > KNOWN:
                self._known.popitem(last=False)
            if self._held + size > HELD:
                raise HostMemoryError(
                    f"requests hold images of {self._held} bytes, and {HELD} is the most: try again when one has ended"
                )
            self._held += size
        image = Image(self, data, most, told, parts)
        weakref.finalize(image, self._let_go, len(data))
        image.freed = weakref.finalize(image, self._let_go, size - len(data))  # is called once
        return image

    def _let_go(self, size: int) -> None:
        with self._lock:
            self._held -= size

    def split(self, data: bytes, most: int) -> tuple[_Told, list[_Part]]:
        """What stands for an image, and its parts to encode. Raises as `read`."""
        encoder = self.encoder
        mtmd, context = encoder.mtmd, encoder.context
        bitmap = vision.bitmap_of(mtmd, data, most)
        try:
            chunks = mtmd.mtmd_input_chunks_init()
            owner = _Chunks(mtmd, chunks)
            text = mtmd.mtmd_input_text()
            text.text = mtmd.mtmd_default_marker()
            text.text_len, text.add_special, text.parse_special = len(text.text), False, True
            bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
            code = mtmd.mtmd_tokenize(context, chunks, ctypes.byref(text), bitmaps, 1)
        finally:
            mtmd.mtmd_bitmap_free(bitmap)
        if code:
            raise ConfigError(
                f"the projector cannot take an image of {len(data)} bytes ({code}): send it in another size"
            )
        tokens: list[int] = []
        told: list[vision.Rows] = []
        parts: list[_Part] = []
        for i in range(mtmd.mtmd_input_chunks_size(chunks)):
            chunk = mtmd.mtmd_input_chunks_get(chunks, i)
            if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
                count = ctypes.c_size_t()
                found = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
                tokens += found[: count.value]
                continue
            told.append(encoder.rows(chunk, len(told) + 1))
            parts.append(_Part(chunk, owner))
            tokens += told[-1].numbers.tolist()
        return _Told(tuple(tokens), tuple(told)), parts


def image_reader_of(llm: Any) -> ImageReader | None:
    """What reads images for a model, None for one that sees none. ConfigError where something drafts beside images."""
    return ImageReader(llm) if isinstance(llm.chat_handler, vision.HANDLERS) else None
