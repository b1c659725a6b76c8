"""What becomes of a file that ends, keeps or takes over the program that decodes it."""

from __future__ import annotations

import errno
import math
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvflash_ggml.errors import ConfigError, KVFlashError
from kvflash_ggml.media import decoder, files

WAV = b"RIFF\0\0\0\0WAVE"


def decode(
    monkeypatch: pytest.MonkeyPatch, folder: Path, program: str, *, data: bytes = b"image", most: int = 100
) -> Any:
    """What is in a file that makes the decoder run `program`. most: pixels, or samples."""
    file = folder / "program.py"
    file.write_text(f"import os, sys, time\n{program}\n")
    monkeypatch.setattr(files, "_PROGRAM", file)
    return files.decode(data, "libmtmd.so", limits=files.MediaLimits(pixels=most, seconds=most // 10), rate=10)


def writes(width: int, height: int, count: int) -> str:
    head = width.to_bytes(4, "little") + height.to_bytes(4, "little")
    return f"sys.stdout.buffer.write({head!r} + bytes({count}))"


def test_it_is_told_its_file_and_its_bounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVFLASH_API_KEY", "secret")
    told = tmp_path / "told"
    seen = f"open({str(told)!r}, 'w').write(repr((sys.stdin.read(), sys.argv[1:], 'KVFLASH_API_KEY' in os.environ)))"
    pixels = decode(monkeypatch, tmp_path, f"{seen}\n{writes(4, 5, 60)}")
    assert (pixels.width, pixels.height, pixels.data) == (4, 5, bytes(60))
    bounds = ["libmtmd.so", "10", str(2400 + (64 << 20))]
    assert told.read_text() == repr(("image", [*bounds, "0"], False))
    sound = decode(monkeypatch, tmp_path, f"{seen}\n{writes(100, 1, 400)}", data=WAV)
    assert sound == files.Sound(100, bytes(400))
    assert told.read_text() == repr((WAV.decode(), [*bounds, "10"], False))


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("os.abort()", "5 bytes cannot be decoded: it is damaged"),
        ("sys.exit(3)", "cannot be decoded"),
        (writes(0, 0, 0), "cannot be decoded"),
        (writes(4, 5, 59), "cannot be decoded"),
        (writes(4, 5, 61), "cannot be decoded"),
        (f"{writes(4, 5, 0)}\nwhile True: sys.stdout.buffer.write(bytes(99999))", "cannot be decoded"),
        (writes(101, 1, 303), "101 x 1 pixels, and 100 is the most"),
        (writes(1 << 31, 1 << 31, 0), "pixels, and 100 is the most"),
    ],
)
def test_what_is_no_image_is_refused(program: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        decode(monkeypatch, tmp_path, program)


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("os.abort()", "a sound of 12 bytes cannot be decoded: it is damaged, empty, or far longer than 10 seconds"),
        (writes(0, 1, 0), "cannot be decoded"),
        (writes(20, 1, 79), "cannot be decoded"),
        (writes(20, 2, 80), "cannot be decoded"),
        (writes(115, 1, 460), "a sound has 12 seconds, and 10 is the most: cut it into parts"),
        (f"{writes(20, 1, 0)}\nwhile True: sys.stdout.buffer.write(bytes(99999))", "cannot be decoded"),
    ],
)
def test_what_is_no_sound_is_refused(program: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        decode(monkeypatch, tmp_path, program, data=WAV)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("at", "count"), [(0, 20), (19, 1), (7, 2)])
def test_samples_that_are_not_finite_are_refused(
    value: float, at: int, count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = struct.pack("<20f", *[value if at <= i < at + count else 0.5 for i in range(20)])
    program = f"sys.stdout.buffer.write({(20).to_bytes(4, 'little') + (1).to_bytes(4, 'little') + made!r})"
    with pytest.raises(ConfigError, match=f"{count} of 20 samples of a sound are not finite, the first at {at}: write"):
        decode(monkeypatch, tmp_path, program, data=WAV)


def test_sound_is_told_by_how_it_begins() -> None:
    rest = bytes(12)
    assert all(files.is_sound(head + rest) for head in (WAV, b"ID3", b"\xff\xfb", b"\xff\xe0", b"fLaC"))
    images = (b"\xff\xd8\xff\xe0", b"\x89PNG", b"RIFF\0\0\0\0WEBP", b"GIF89a", b"")
    assert not any(files.is_sound(head + rest) for head in images)
    assert not files.is_sound(WAV[:11])


def test_a_strip_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert decode(monkeypatch, tmp_path, writes(200, 1, 600), most=1000).width == 200
    with pytest.raises(ConfigError, match="201 x 1 pixels, and one side may be 200 times the other"):
        decode(monkeypatch, tmp_path, writes(201, 1, 603), most=1000)


def test_one_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(files, "SECONDS", 0.2)
    number = tmp_path / "number"
    stays = f"open({str(number)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    began = time.monotonic()
    with pytest.raises(ConfigError, match="cannot be decoded"):
        decode(monkeypatch, tmp_path, stays)
    assert time.monotonic() - began < 300
    if number.exists():  # a slow machine ends it before it begins
        with pytest.raises(ProcessLookupError):
            os.kill(int(number.read_text()), 0)


def test_a_decoder_that_is_not_there_is_no_damaged_image(tmp_path: Path) -> None:
    with pytest.raises(KVFlashError, match="cannot be loaded by a process of its own"):
        files.decode(b"image", tmp_path / "libmtmd.so")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps to the bounds")
def test_a_decoder_that_was_taken_over_opens_nothing() -> None:
    program = f"""
import os, runpy
runpy.run_path({str(Path(decoder.__file__))!r})["_limit"](5, 1 << 30)
os.close(0)
try:
    os.open("/proc/self/environ", os.O_RDONLY)
except OSError as err:
    print(err.errno)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(errno.EMFILE)
