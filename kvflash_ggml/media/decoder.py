"""Decodes one file in a process of its own, which a hostile file can end: the program behind `files.decode`.

Run it with the path of libmtmd, bounds in seconds of the CPU and in bytes, and the samples of sound in a second. It
reads the file from stdin. To stdout it writes width and height, four bytes each, and RGB; or the number of samples, 1,
and the samples. It imports nothing of the package, which would take longer. With PDF in the place of a library, and no
samples, it writes the number of pages, 0, and their text in UTF-8.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import sys
from pathlib import Path

with contextlib.suppress(ModuleNotFoundError):  # Windows has no limits
    import resource

REFUSED, NO_LIBRARY = 3, 4
"""Exit statuses: for a file that cannot be decoded, or has no room; and where there is no decoder that fits."""


PDF = "pdf"


class _Options(ctypes.Structure):
    """As `mtmd_helper_init_opt`, which only videos look at."""

    _fields_ = (("fps", ctypes.c_float), ("folder", ctypes.c_char_p), ("interval", ctypes.c_int64))


class _Made(ctypes.Structure):
    """As `mtmd_helper_bitmap_wrapper`."""

    _fields_ = (("bitmap", ctypes.c_void_p), ("video", ctypes.c_void_p))


def main(library: str, seconds: int, memory: int, rate: int) -> int:
    """Decode stdin to stdout; the exit status."""
    data = sys.stdin.buffer.read()
    try:
        lib = ctypes.CDLL(library)
    except OSError:
        return NO_LIBRARY
    model = _listening(rate)
    _limit(seconds, memory)
    lib.mtmd_get_audio_sample_rate.argtypes = [ctypes.c_void_p]
    if rate and lib.mtmd_get_audio_sample_rate(model) != rate:
        return NO_LIBRARY  # the file is not to blame: this library looks elsewhere for the rate
    decode = lib.mtmd_helper_bitmap_init_from_buf
    decode.restype = _Made
    decode.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_bool, _Options]
    made = decode(model, data, len(data), False, _Options())
    if not made.bitmap:
        return REFUSED
    bitmap = ctypes.c_void_p(made.bitmap)
    lib.mtmd_bitmap_get_n_bytes.restype = ctypes.c_size_t
    lib.mtmd_bitmap_get_data.restype = ctypes.c_void_p
    width, height = lib.mtmd_bitmap_get_nx(bitmap), lib.mtmd_bitmap_get_ny(bitmap)
    size = lib.mtmd_bitmap_get_n_bytes(bitmap)
    found = (ctypes.c_char * size).from_address(lib.mtmd_bitmap_get_data(bitmap) or 0)
    sys.stdout.buffer.write(width.to_bytes(4, "little") + height.to_bytes(4, "little"))
    sys.stdout.buffer.write(found)
    return 0


def read_pdf(seconds: int, memory: int) -> int:
    """Write the text of a PDF from stdin to stdout; the exit status."""
    from pypdf import PdfReader

    data = sys.stdin.buffer.read()
    _limit(seconds, memory, files=64)  # it imports parts of itself when a file needs them
    try:
        texts = [page.extract_text() for page in PdfReader(io.BytesIO(data)).pages]
    except Exception:  # a damaged file fails in many ways
        return REFUSED
    sys.stdout.buffer.write(len(texts).to_bytes(4, "little") + bytes(4))
    sys.stdout.buffer.write("\n\n".join(texts).encode("utf-8", "replace"))
    return 0


def _listening(rate: int) -> ctypes.Array[ctypes.c_uint64] | None:
    """Make what the decoder takes for a model that hears `rate` samples in a second; None for 0.

    It asks its model for nothing else, and a whole one would have to be loaded here. It follows a pointer, and reads a
    number behind that, wherever they lie: here all pointers lead to numbers, and all numbers are the rate.
    """
    if not rate:
        return None
    pointers, numbers = 512, 1 << 16
    memory = (ctypes.c_uint64 * (pointers + numbers))()
    for i in range(pointers + numbers):
        memory[i] = ctypes.addressof(memory) + 8 * pointers if i < pointers else rate | rate << 32
    return memory


def _limit(seconds: int, memory: int, *, files: int = 0) -> None:
    """Bound the time of the CPU, the memory beyond what there is now, and the open files; leave no core dump."""
    if "resource" not in globals():
        return
    bounds = {resource.RLIMIT_CPU: seconds, resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: files}
    with contextlib.suppress(OSError):  # only Linux says how much there is, and keeps to it
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        bounds[resource.RLIMIT_AS] = pages * resource.getpagesize() + memory
    for which, most in bounds.items():
        with contextlib.suppress(ValueError, OSError):  # there is a lower one
            resource.setrlimit(which, (most, most))


if __name__ == "__main__":
    library, *bounds = sys.argv[1:]
    sys.exit(read_pdf(*map(int, bounds)) if library == PDF else main(library, *map(int, bounds)))
