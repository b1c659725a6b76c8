"""Parses clients' JSON, once its depth and its values are counted."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import numpy as np

from ..chat.words import finite

MAX_DEPTH = 128
"""Lists and objects within each other. Every recursion over a body ends far below Python's limit."""

MAX_VALUES = 1 << 20
"""Of one body. The parser holds the interpreter for about 0.1 s for so many."""

MAX_PARTS = 1 << 17
"""Lists, objects and names in them, of one body: each costs the parser ten numbers' time."""

MAX_NAMES = 1 << 12
"""In one object. Chat templates take the square of their number in time: 8 s for four times as many."""

_PART = 1 << 20
_QUOTE, _COMMA, _COLON, _OPEN, _CLOSE = b'",:{}'
_TO_BRACE = 0x20
"""The bit that makes a brace of a bracket."""

_SURROGATES = re.compile(rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|([89a-fA-F][0-9a-fA-F]{2}))")
"""A pair, or half of one. The pattern begins with what both have: a search for it is 15 times as fast as for either."""


class Refused(ValueError):
    """JSON that may be well formed, and is not read."""


def loads(data: bytes | bytearray, *, most: int = MAX_VALUES) -> Any:
    """Parse UTF-8 JSON of at most `most` values.

    Half of a surrogate pair becomes U+FFFD: programs cut texts in two. ValueError for what is no JSON. Refused for what
    is too deep, or has too many values.
    """
    data = _whole(data)
    _check(data, most)
    try:
        text = data.decode("utf-8-sig")
        return json.loads(text, parse_constant=finite, parse_float=finite, object_pairs_hook=_object)
    except RecursionError as err:
        raise Refused(str(err)) from None
    except ValueError as err:
        if type(err) is ValueError and "digits" in str(err):  # the bound of `int`, whose remedy is a program's
            raise Refused(f"an integer has more than {sys.get_int_max_str_digits()} digits: shorten it") from None
        raise


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_NAMES:
        raise Refused(f"an object has {len(pairs)} names, and {MAX_NAMES} is the most: send fewer")
    return dict(pairs)


def _whole(data: bytes | bytearray) -> bytes | bytearray:
    """Replace each half of a surrogate pair by U+FFFD."""
    if b"\\u" not in data:
        return data
    halves = [found.start(1) for found in _SURROGATES.finditer(data.replace(b"\\\\", b"__")) if found[1]]
    if halves:
        data = bytearray(data)
        for place in halves:
            data[place - 1 : place + 3] = b"fffd"
    return data


def _check(data: bytes | bytearray, most: int) -> None:
    """Refuse by a pass over the bytes that keeps no more than one part of them."""
    if b"\\" in data:
        # no quote that stays has a backslash before it
        data = data.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    if len(data) <= MAX_DEPTH:
        return
    depth = values = parts = inside = 0
    for start in range(0, len(data), _PART):
        part = np.frombuffer(data, np.uint8, min(_PART, len(data) - start), start)
        quotes = np.cumsum(part == _QUOTE, dtype=np.uint8) + np.uint8(inside)  # only odd or even counts
        outside = part[quotes & 1 == 0]
        inside = int(quotes[-1]) & 1
        braces = outside | _TO_BRACE
        opens, closes = braces == _OPEN, braces == _CLOSE
        levels = depth + np.cumsum(opens.view(np.int8) - closes.view(np.int8), dtype=np.int64)
        if not len(levels):
            continue
        deepest, depth = int(levels.max()), int(levels[-1])
        if deepest > MAX_DEPTH:
            raise Refused(f"it is nested {deepest} deep, and {MAX_DEPTH} is the most: make it flatter")
        parts += int(np.count_nonzero(opens)) + int(np.count_nonzero(outside == _COLON))
        values += int(np.count_nonzero(outside == _COMMA))
        if parts > MAX_PARTS:
            raise Refused(f"it has {parts} lists, objects and names or more, and {MAX_PARTS} is the most: send fewer")
        if values > most:
            raise Refused(f"it has {values} values or more, and {most} is the most: send fewer")
