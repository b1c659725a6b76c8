"""How people write sizes and texts: on the command line, in variables, in requests and as keywords."""

from __future__ import annotations

import re
from typing import Any, Literal

from .errors import ConfigError, brief

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)((?:i?B)?)", re.IGNORECASE)
_SHIFT = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def size(text: str) -> int:
    """Read bytes, with an optional K, M, G or T (powers of 1024). ValueError for any other text."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size: write bytes, or 512M, 8G")
    return int(float(match[1]) * (1 << _SHIFT[match[2].upper()]))


def ceiling(text: str) -> int | Literal["auto"]:
    """Read bytes, or "auto". ValueError for any other text."""
    if text.strip().lower() == "auto":
        return "auto"
    try:
        return size(text)
    except ValueError as err:
        raise ValueError(f"{err}, or 'auto'") from None


def pool(text: str) -> dict[str, Any] | None:
    """Read a size of the pool as fields of KVFlashConfig; None for "off". ValueError for any other text.

    "auto", tokens (4096, 4K), or bytes on the device: with M, G, T or a B at the end.
    """
    word = text.strip().lower()
    if word == "off":
        return None
    if word == "auto":
        return {"pool": "auto"}
    match = _SIZE.fullmatch(word)
    if match is None or (count := size(word)) == 0 or not (match[2] or match[3] or word.isdecimal()):
        raise ValueError(f"{text!r} is not a number of tokens (4096, 4K), a size (512M, 2G), 'auto' or 'off'")
    return {"pool": count} if match[2] in ("", "k") and not match[3] else {"pool_bytes": count}


def word(text: str) -> str:
    """Return the text. ValueError for an empty one, as of a variable that is not set."""
    if not text.strip():
        raise ValueError(f"{text!r} names nothing: give a value, or leave it out")
    return text


def names(text: str) -> tuple[str, ...]:
    """Read names between commas, at least one."""
    return tuple(map(str.strip, map(word, text.split(","))))


def tokens(text: str) -> int:
    """Read a number of tokens, with an optional K or M (powers of 1024). ValueError for any other text."""
    word = text.strip()
    if re.fullmatch(r"-?\d+", word):
        return int(word)
    if re.fullmatch(r"[\d.]+\s*[KM]", word, re.IGNORECASE):
        return size(word)
    raise ValueError(f"{text!r} is not a number of tokens: write it as 16384, or 16K, 1M")


def limit(text: str) -> int:
    """Read a number of tokens of at least 1, or -1 for no limit. ValueError for any other text."""
    number = tokens(text)
    if number == -1 or number > 0:
        return number
    raise ValueError(f"{text!r} is not a number of tokens (-1: no limit)")


def key(text: str) -> str:
    """Read an API key: visible ASCII, as a header can carry it. ValueError, which does not repeat it, for others."""
    if not re.fullmatch(r"[!-~]+", text):
        raise ValueError("an API key is of visible ASCII characters, at least one: no client could send this one")
    return text


def origin(text: str) -> str:
    """Read an origin as browsers send it, or "*". ValueError for any other text."""
    if text not in ("*", "null") and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s,]+", text.lower()):
        raise ValueError(
            f"{text!r} is not an origin, as https://chat.example.org: no path, and no slash at the end. Repeat the"
            " option for several, or give *"
        )
    return text.lower()


def pin(text: str) -> tuple[int, int]:
    """Read a half-open range of tokens, LO:HI, as 0:512 or 0:4K. ValueError for any other text."""
    try:
        lo, hi = map(tokens, text.split(":"))
    except ValueError:
        lo, hi = 0, 0
    if not 0 <= lo < hi:
        raise ValueError(f"{text!r} is not a range: write LO:HI with LO < HI, as in 0:512")
    return lo, hi


_SWITCH = {"1": True, "on": True, "true": True, "yes": True, "0": False, "off": False, "false": False, "no": False}


def switch(text: str) -> bool:
    """Read on or off. ValueError for any other text."""
    try:
        return _SWITCH[text.strip().lower()]
    except KeyError:
        raise ValueError(f"{text!r} is neither on nor off") from None


def prefix(text: str) -> str:
    """Read the beginning of a path, as /llm; nothing, or /, for none. ValueError for any other text."""
    if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)*", text.rstrip("/")):
        raise ValueError(f"{text!r} is not the beginning of a path, as /llm")
    return text.rstrip("/")


def calibrate(text: str) -> bool | str:
    """Read on, off, or the file of a calibration."""
    return _SWITCH.get(text.strip().lower(), text)


def stop_texts(value: Any) -> list[str]:
    """Return the texts before which an answer ends. value: one text, several, or None. ConfigError for another."""
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"stop={brief(repr(value))}: a text, or a list of texts")
    return list(texts)
