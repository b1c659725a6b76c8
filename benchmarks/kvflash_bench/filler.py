"""The text that facts are hidden in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvflash_ggml.errors import ConfigError

CHECKOUT = Path(__file__).parents[2] / "tests" / "text"


def read_text(paths: Sequence[Path]) -> str:
    """The files, one after the other; without any, the texts that a checkout of this project carries."""
    if not paths:
        paths = sorted(CHECKOUT.glob("*.txt"))
    if not paths:
        raise ConfigError("the installed package carries no text to hide facts in: give a long text file with --text")
    try:
        return "\n".join(path.read_text(encoding="utf-8") for path in paths)
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"cannot read the text: {err}") from err
