"""How a page image is stored: as it is, or compressed with Zstandard (the optional package `zstandard`)."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from .. import pip_line
from ..arrays import Buffer
from ..errors import ConfigError, SnapshotError

RAW = 0
ZSTD = 1
LEVEL = 3
HEAD = 18
"""Bytes at the beginning of a compressed image that say how large it is."""


def encode(image: Buffer) -> tuple[Buffer, int]:
    """Return the bytes to store and their codec. An image that does not shrink is stored as it is."""
    packed: bytes = require().ZstdCompressor(level=LEVEL).compress(image)
    return (packed, ZSTD) if len(packed) < len(image) else (image, RAW)


def decode(stored: bytes, codec: int, image: memoryview) -> None:
    """Fill `image`. SnapshotError unless the stored bytes are exactly that."""
    assert codec == ZSTD, "codecs are checked when the file is opened"
    zstd = require()
    try:
        # a hostile frame can promise any size, and the library would believe it
        if zstd.frame_content_size(stored) != len(image):
            raise SnapshotError(f"a compressed page image does not hold the {len(image)} bytes of a page")
        image[:] = zstd.ZstdDecompressor().decompress(stored, max_output_size=len(image))
    except (zstd.ZstdError, ValueError) as err:
        raise SnapshotError(f"a compressed page image cannot be read: {err}") from err


def image_size(head: bytes) -> int:
    """Return the bytes of an image whose stored bytes begin so. SnapshotError if they do not say."""
    zstd = require()
    try:
        return int(zstd.frame_content_size(head))
    except zstd.ZstdError as err:
        raise SnapshotError(f"a compressed page image cannot be read: {err}") from err


def check(codecs: set[int], name: str) -> None:
    """Raise SnapshotError for unknown codecs, ConfigError for one whose package is missing."""
    unknown = codecs - {RAW, ZSTD}
    if unknown:
        raise SnapshotError(f"{name} has page images in an unknown form ({min(unknown)})")
    if ZSTD in codecs:
        require()


@cache
def require() -> Any:
    """Return the package `zstandard`. ConfigError unless it is installed."""
    try:
        return importlib.import_module("zstandard")
    except ImportError as err:
        line = pip_line.install("zstd")
        raise ConfigError(f"compressed snapshots need the package zstandard: {line}") from err
