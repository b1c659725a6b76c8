"""Files of images, of sound and of PDFs, which may be hostile, as pixels, samples and text."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import ConfigError, KVFlashError
from .decoder import NO_LIBRARY, PDF

LONGEST = 200
"""Times that one side of an image may be as long as the other."""

SECONDS = 10
"""Of the CPU, for one file; and three times as many of the clock. A photo takes 0.1, ten minutes of silent MP3 0.6."""

_EACH = 24
"""Bytes of memory for a pixel: a PNG of 16 bits and four channels lies there twice. A sample lies there twice too."""
_BESIDE = 64 << 20
_PROGRAM = Path(__file__).with_name("decoder.py")
MOST_TEXT = 16 << 20
"""Bytes of a PDF's text."""
_PDF_MEMORY = 1 << 30
"""Bytes. A PDF of 20 MB with 1,000 pages takes a tenth."""
_KEPT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")
"""Variables that the program sees: it may be taken over, and others hold secrets."""


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Of one file. pixels: of an image; a photo of a telephone has 12 million. seconds: of sound."""

    pixels: int = 32 << 20
    seconds: int = 600


@dataclass(frozen=True, slots=True)
class Pixels:
    """An image: RGB, row by row, 3 * width * height bytes."""

    width: int
    height: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Sound:
    """Samples of one channel in single precision, 4 * count bytes."""

    count: int
    data: bytes


def is_sound(data: bytes) -> bool:
    """Tell whether llama.cpp takes a file for sound, by how it begins: WAV, MP3 or FLAC."""
    if len(data) < 12:
        return False
    wav, mp3 = data[:4] == b"RIFF" and data[8:12] == b"WAVE", data[0] == 0xFF and data[1] >= 0xE0
    return wav or mp3 or data[:3] == b"ID3" or data[:4] == b"fLaC"


def decode(data: bytes, libmtmd: Path | str, *, limits: MediaLimits | None = None, rate: int = 0) -> Pixels | Sound:
    """Decode a file as llama.cpp does: PNG, JPEG, GIF, BMP and a few more; WAV, MP3 and FLAC.

    Another process decodes, with bounds on its time and memory, so that a hostile file ends that one at worst.
    libmtmd: the library with the decoder, KVFlashError if it cannot be loaded. limits: `MediaLimits()` unless given.
    rate: samples of sound in a second, above 0 where `is_sound`. ConfigError for what is damaged or too large.
    """
    limits = limits or MediaLimits()
    if is_sound(data):
        return _sound(data, libmtmd, limits.seconds, rate)
    return _pixels(data, libmtmd, limits.pixels)


def pdf_text(data: bytes) -> tuple[int, str]:
    """Return the number of pages of a PDF, and their text. It needs pypdf. ConfigError for what has none, or too much.

    Another process reads it, with the bounds of `decode`.
    """
    pages, _, made = _bounded([PDF, str(SECONDS), str(_PDF_MEMORY)], data, MOST_TEXT, "-I")[:3]
    text = made.decode("utf-8", "replace")
    if len(made) > MOST_TEXT:
        raise ConfigError(f"a PDF has more than {MOST_TEXT} bytes of text: send a part of its pages")
    if not pages:
        raise ConfigError(
            f"a PDF of {len(data)} bytes cannot be read: it is damaged, encrypted, or takes more than {SECONDS} seconds"
        )
    if not text.strip():
        raise ConfigError(f"a PDF of {pages} pages has no text: it may be a scan: send its pages as images")
    return pages, text


def _pixels(data: bytes, libmtmd: Path | str, most: int) -> Pixels:
    width, height, made = _run(data, libmtmd, 3 * most, _EACH * most, 0)
    if width * height > most:
        raise ConfigError(f"an image has {width} x {height} pixels, and {most} is the most: make it smaller")
    if not width * height or len(made) != 3 * width * height:
        raise ConfigError(
            f"an image of {len(data)} bytes cannot be decoded: it is damaged, of no known format, or has far more than "
            f"{most} pixels: send a smaller PNG or JPEG"
        )
    if max(width, height) > LONGEST * min(width, height):
        raise ConfigError(
            f"an image has {width} x {height} pixels, and one side may be {LONGEST} times the other: cut it into parts"
        )
    return Pixels(width, height, made)


def _sound(data: bytes, libmtmd: Path | str, seconds: int, rate: int) -> Sound:
    most = seconds * rate
    count, rows, made = _run(data, libmtmd, 4 * most, _EACH * most, rate)
    if count > most:
        raise ConfigError(f"a sound has {count / rate:.0f} seconds, and {seconds} is the most: cut it into parts")
    if not count or rows != 1 or len(made) != 4 * count:
        raise ConfigError(
            f"a sound of {len(data)} bytes cannot be decoded: it is damaged, empty, or far longer than {seconds} "
            "seconds: send a shorter WAV, MP3 or FLAC"
        )
    strange = np.flatnonzero(~np.isfinite(np.frombuffer(made, np.float32)))
    if len(strange):
        raise ConfigError(
            f"{len(strange)} of {count} samples of a sound are not finite, the first at {strange[0]}: write the file "
            "again, with samples between -1 and 1"
        )
    return Sound(count, made)


def _run(data: bytes, libmtmd: Path | str, most: int, memory: int, rate: int) -> tuple[int, int, bytes]:
    """Run the decoder. Return the two numbers that it writes, 0 where it fails, and at most `most` + 1 bytes after
    them.
    """
    bounds = [str(libmtmd), str(SECONDS), str(memory + _BESIDE), str(rate)]
    first, second, made, status = _bounded(bounds, data, most, "-I", "-S")
    if status == NO_LIBRARY:
        raise KVFlashError(f"{libmtmd} cannot be loaded by a process of its own: no file can be decoded")
    return first, second, made


def _bounded(arguments: list[str], data: bytes, most: int, *flags: str) -> tuple[int, int, bytes, int]:
    """Run the program on a file. Return what it writes, as `_run`, and how it has ended. flags: of Python."""
    command = [sys.executable, *flags, str(_PROGRAM), *arguments]
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        with subprocess.Popen(
            command, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
            start_new_session=True,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            late = threading.Timer(3 * SECONDS, _kill, [process])
            late.start()
            try:
                made = process.stdout.read(8 + most + 1)
                if len(made) <= 8 + most:
                    process.wait()  # it ends, or is killed
            finally:
                late.cancel()
                _kill(process)
    first, second = (int.from_bytes(made[at : at + 4], "little") for at in (0, 4))
    return first, second, made[8:], process.returncode


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process that has not been waited for, and what it has begun."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
