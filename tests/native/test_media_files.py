"""Files that strangers send: decoded as upstream does, in a process that they may end."""

from __future__ import annotations

import base64
import ctypes
import random

import pytest
from support.sounds import flac, mp3, wav
from support.vision import JPEGS, png

from kvflash_ggml.errors import ConfigError
from kvflash_ggml.media import files
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
    assert files.decode(data, libmtmd) == files.Pixels(width, height, theirs)
    assert len(set(theirs)) > 1


def test_one_that_unpacks_without_end_is_refused(libmtmd: str) -> None:
    """60,000 x 60,000 pixels in a few bytes: its process has no memory for them."""
    bomb = PNG[:16] + (60_000).to_bytes(4, "big") * 2 + PNG[24:]
    with pytest.raises(ConfigError, match="cannot be decoded"):
        files.decode(bomb, libmtmd)


SOUNDS = {"wav": wav(5), "flac": flac(5), "mp3": mp3(40)}


@pytest.mark.parametrize("kind", SOUNDS)
def test_sound_is_decoded(kind: str, libmtmd: str) -> None:
    """At the rate of a model; `test_audio.py` compares the samples with upstream's own."""
    for rate in (16000, 24000):
        sound = files.decode(SOUNDS[kind], libmtmd, rate=rate)
        assert isinstance(sound, files.Sound)
        seconds = 40 * 1152 / 44100 if kind == "mp3" else 5 * 640 / 16000
        assert abs(sound.count / rate - seconds) < 0.06 * seconds
        assert len(sound.data) == 4 * sound.count
    assert (
        files.decode(SOUNDS["wav"], libmtmd, rate=16000).data == files.decode(SOUNDS["flac"], libmtmd, rate=16000).data
    )


def test_sound_that_is_too_long_is_refused(libmtmd: str) -> None:
    """However long its head says it is."""
    with pytest.raises(ConfigError, match="a sound has 3 seconds, and 2 is the most"):
        files.decode(wav(75), libmtmd, limits=files.MediaLimits(seconds=2), rate=16000)
    bomb = bytearray(flac(5))
    bomb[21:26] = b"\xff" * 5  # samples that its head speaks of
    with pytest.raises(ConfigError, match=r"a sound of .* cannot be decoded"):
        files.decode(bytes(bomb), libmtmd, rate=16000)


@pytest.mark.parametrize("count", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_mutated_files_cost_nothing_but_themselves(count: int, libmtmd: str) -> None:
    chance, ends = random.Random(count), {"decoded": 0, "refused": 0}
    for _ in range(count):
        whole = chance.choice([PNG, *JPEGS, *SOUNDS.values()])
        data, reach = bytearray(whole), min(len(whole), 400) if whole in SOUNDS.values() else len(whole)
        for _ in range(chance.randint(1, 8)):
            data[chance.randrange(2, reach)] = chance.randrange(256)
        if chance.random() < 0.2:
            del data[chance.randrange(len(data)) :]
        try:
            assert len(files.decode(bytes(data), libmtmd, rate=16000).data) > 0
            ends["decoded"] += 1
        except ConfigError:
            ends["refused"] += 1
    assert min(ends.values()) > 0, ends
