"""Assertions of ggml as errors, while a file is loaded that somebody else has made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import ConfigError
from ._kvf import ffi, lib


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Load a file in the block: an assertion that fails on this thread ends the load, and not the process.

    Nothing may be computed in it. what: names the file. ConfigError, in place of the loader's own error, with the
    assertion.
    """
    lib.kvf_guard_begin()
    try:
        yield
    except Exception as err:
        if failed := _end():
            raise ConfigError(f"{what} cannot be used: llama.cpp says {failed}: convert it again") from err
        raise
    except BaseException:
        _end()
        raise
    else:
        _end()


def _end() -> str:
    """End the guard. Return the assertion that has failed, without its folder; "" for none."""
    text: str = ffi.string(lib.kvf_guard_end()).decode("utf-8", "replace")
    return text.rpartition("/")[2]
