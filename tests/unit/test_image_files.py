"""What becomes of an image that ends, keeps or takes over the program that decodes it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvflash_ggml.errors import ConfigError, KVFlashError
from kvflash_ggml.media import decoder, images


def decode(monkeypatch: pytest.MonkeyPatch, folder: Path, program: str, *, most: int = 100) -> images.Pixels:
    """The pixels of an image that makes the decoder run `program`."""
    file = folder / "program.py"
    file.write_text(f"import os, sys, time\n{program}\n")
    monkeypatch.setattr(images, "_PROGRAM", file)
    return images.decode(b"image", "libmtmd.so", most=most)


def writes(width: int, height: int, count: int) -> str:
    head = width.to_bytes(4, "little") + height.to_bytes(4, "little")
    return f"sys.stdout.buffer.write({head!r} + bytes({count}))"


def test_it_is_told_its_file_and_its_bounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVFLASH_API_KEY", "secret")
    told = tmp_path / "told"
    seen = f"open({str(told)!r}, 'w').write(repr((sys.stdin.read(), sys.argv[1:], 'KVFLASH_API_KEY' in os.environ)))"
    pixels = decode(monkeypatch, tmp_path, f"{seen}\n{writes(4, 5, 60)}")
    assert (pixels.width, pixels.height, pixels.data) == (4, 5, bytes(60))
    assert told.read_text() == repr(("image", ["libmtmd.so", "10", str(2400 + (64 << 20))], False))


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


def test_a_strip_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert decode(monkeypatch, tmp_path, writes(200, 1, 600), most=1000).width == 200
    with pytest.raises(ConfigError, match="201 x 1 pixels, and one side may be 200 times the other"):
        decode(monkeypatch, tmp_path, writes(201, 1, 603), most=1000)


def test_one_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(images, "SECONDS", 0.2)
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
        images.decode(b"image", tmp_path / "libmtmd.so")


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
