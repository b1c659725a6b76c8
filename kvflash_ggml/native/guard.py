"""Why llama.cpp has refused a file that somebody else has made, as an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import ConfigError, DecodeError
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


def check_step() -> None:
    """Raise DecodeError if an assertion has failed the step that this thread last asked for."""
    if said := reason():
        raise DecodeError(f"llama.cpp says {said}: convert the model again, or leave out what replaces its values")


def no_split() -> ConfigError:
    """Return the error for a text that llama.cpp could not split into tokens on this thread."""
    return ConfigError(f"llama.cpp cannot split this text: {reason()}. Convert the model with its tokenizer")


def reason() -> str:
    """Return why llama.cpp refused what this thread last gave it, "" if it did not. It tells it once."""
    text: str = ffi.string(lib.kvf_guard_reason()).decode("utf-8", "replace")
    return text.removeprefix("operator(): ")
