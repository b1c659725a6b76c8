"""Builds the cffi extension `kvflash_ggml.native._kvf` from `kvf.h` and `kvf_chat.h`.

API mode: the C compiler checks every declaration against the headers, so drift is a build error.
"""

from __future__ import annotations

from pathlib import Path

from cffi import FFI

HEADERS = tuple(Path(__file__).with_name(name) for name in ("kvf.h", "kvf_chat.h"))


def declarations() -> str:
    """Return the parts of the headers between the cdef markers, which cffi can parse as they stand."""
    texts = (header.read_text(encoding="utf-8") for header in HEADERS)
    return "".join(text.partition("// [cdef]")[2].partition("// [/cdef]")[0] for text in texts)


ffibuilder = FFI()
ffibuilder.cdef(declarations())
source = "".join(f'#include "{header.name}"\n' for header in HEADERS)
ffibuilder.set_source("kvflash_ggml.native._kvf", source, py_limited_api=True)
