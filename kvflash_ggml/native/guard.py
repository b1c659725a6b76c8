"""Why llama.cpp has refused a file that somebody else has made, as an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import ConfigError
from ._kvf import ffi, lib


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Load a projector in the block, or cut an image into its parts.

    what: names the file. ConfigError, in place of upstream's own error, with what llama.cpp says.
    """
    reason()  # of an earlier call
    try:
        yield
    except Exception as err:
        if said := reason():
            raise ConfigError(f"{what} cannot be used: llama.cpp says {said}: convert it again") from err
        raise


def reason() -> str:
    """Return why libmtmd refused what this thread last gave it, "" if it did not. It tells it once."""
    text: str = ffi.string(lib.kvf_guard_reason()).decode("utf-8", "replace")
    return text.removeprefix("operator(): ")
