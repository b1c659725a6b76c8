"""Image files, which may be hostile, as pixels."""

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

from ..errors import ConfigError, KVFlashError
from .decoder import NO_LIBRARY

MOST_PIXELS = 32 << 20
"""Of one image: a photo of a telephone has 12 million."""

LONGEST = 200
"""Times that one side may be as long as the other."""

SECONDS = 10
"""Of the CPU, for one image; and three times as many of the clock. A photo takes a tenth of one."""

_EACH = 24
"""Bytes of memory for a pixel: a PNG of 16 bits and four channels lies there twice."""
_BESIDE = 64 << 20
_PROGRAM = Path(__file__).with_name("decoder.py")
_KEPT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")
"""Variables that the program sees: it may be taken over, and others hold secrets."""


@dataclass(frozen=True, slots=True)
class Pixels:
    """An image: RGB, row by row, 3 * width * height bytes."""

    width: int
    height: int
    data: bytes


def decode(data: bytes, libmtmd: Path | str, *, most: int = MOST_PIXELS) -> Pixels:
    """The pixels of an image file, as llama.cpp's own decoder reads it: PNG, JPEG, GIF, BMP and a few more.

    Another process decodes, with bounds on its time and memory, so that a hostile file ends that one at worst.
    libmtmd: the library with the decoder, KVFlashError if it cannot be loaded. most: pixels. ConfigError for what is no
    image, and what is too large.
    """
    command = [sys.executable, "-I", "-S", str(_PROGRAM), str(libmtmd), str(SECONDS), str(_EACH * most + _BESIDE)]
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
                made = process.stdout.read(8 + 3 * most + 1)
                if len(made) <= 8 + 3 * most:
                    process.wait()  # it ends, or is killed
            finally:
                late.cancel()
                _kill(process)
    if process.returncode == NO_LIBRARY:
        raise KVFlashError(f"{libmtmd} cannot be loaded by a process of its own: no image can be decoded")
    width, height = int.from_bytes(made[:4], "little"), int.from_bytes(made[4:8], "little")
    if width * height > most:
        raise ConfigError(f"an image has {width} x {height} pixels, and {most} is the most: make it smaller")
    if not width * height or len(made) != 8 + 3 * width * height:
        raise ConfigError(
            f"an image of {len(data)} bytes cannot be decoded: it is damaged, of no known format, or has far more than "
            f"{most} pixels: send a smaller PNG or JPEG"
        )
    if max(width, height) > LONGEST * min(width, height):
        raise ConfigError(
            f"an image has {width} x {height} pixels, and one side may be {LONGEST} times the other: cut it into parts"
        )
    return Pixels(width, height, made[8:])


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process that has not been waited for, and what it has begun."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
