"""Builds the cffi extension `kvflash_ggml.native._kvf` from `kvf.h`.

API mode: the C compiler checks every declaration against the header, so drift is a build error.
"""

from __future__ import annotations

from pathlib import Path

from cffi import FFI

HEADER = Path(__file__).with_name("kvf.h")


def declarations() -> str:
    """The part of `kvf.h` between the cdef markers, which cffi can parse as it stands."""
    text = HEADER.read_text(encoding="utf-8")
    return text.partition("// [cdef]")[2].partition("// [/cdef]")[0]


ffibuilder = FFI()
ffibuilder.cdef(declarations())
ffibuilder.set_source("kvflash_ggml.native._kvf", '#include "kvf.h"', py_limited_api=True)
