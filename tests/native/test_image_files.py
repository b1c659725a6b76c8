"""Image files that strangers send: decoded as upstream does, in a process that they may end."""

from __future__ import annotations

import base64
import ctypes
import random

import pytest
from support.vision import JPEGS, png

from kvflash_ggml.errors import ConfigError
from kvflash_ggml.media import images
from kvflash_ggml.native import library

PNG = base64.b64decode(png((250, 20, 20)).partition(",")[2])


@pytest.fixture(scope="module")
def libmtmd(loaded: None) -> str:
    from llama_cpp import mtmd_cpp

    name: str = mtmd_cpp._libmtmd._name
    assert name.startswith(str(library.library_folder()))
    return name


@pytest.mark.parametrize("data", [PNG, *JPEGS], ids=["png", "jpeg", "progressive"])
def test_pixels_are_upstreams(data: bytes, libmtmd: str) -> None:
    from llama_cpp import mtmd_cpp

    buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
    bitmap = mtmd_cpp.mtmd_helper_bitmap_init_from_buf(None, buffer, len(data), False)
    width, height = mtmd_cpp.mtmd_bitmap_get_nx(bitmap), mtmd_cpp.mtmd_bitmap_get_ny(bitmap)
    theirs = bytes(mtmd_cpp.mtmd_bitmap_get_data(bitmap)[: 3 * width * height])
    mtmd_cpp.mtmd_bitmap_free(bitmap)
    assert images.decode(data, libmtmd) == images.Pixels(width, height, theirs)
    assert len(set(theirs)) > 1


def test_one_that_unpacks_without_end_is_refused(libmtmd: str) -> None:
    """60,000 x 60,000 pixels in a few bytes: its process has no memory for them."""
    bomb = PNG[:16] + (60_000).to_bytes(4, "big") * 2 + PNG[24:]
    with pytest.raises(ConfigError, match="cannot be decoded"):
        images.decode(bomb, libmtmd)


def test_sound_without_a_model_is_refused(libmtmd: str) -> None:
    """Upstream asks the model how it listens, and there is none: that ends the decoder."""
    with pytest.raises(ConfigError, match="cannot be decoded"):
        images.decode(b"RIFF\0\0\0\0WAVEfmt " + bytes(100), libmtmd)


@pytest.mark.parametrize("count", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_mutated_files_cost_nothing_but_themselves(count: int, libmtmd: str) -> None:
    chance, ends = random.Random(count), {"decoded": 0, "refused": 0}
    for _ in range(count):
        data = bytearray(chance.choice([PNG, *JPEGS]))
        for _ in range(chance.randint(1, 8)):
            data[chance.randrange(2, len(data))] = chance.randrange(256)
        if chance.random() < 0.2:
            del data[chance.randrange(len(data)) :]
        try:
            assert len(images.decode(bytes(data), libmtmd).data) > 0
            ends["decoded"] += 1
        except ConfigError:
            ends["refused"] += 1
    assert min(ends.values()) > 0, ends
