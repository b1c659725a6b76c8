"""How the values of options are written: pool sizes, layers, byte sizes, pins."""

from __future__ import annotations

import re
from typing import Literal

import click

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_SHIFT = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


class _Type(click.ParamType):  # type: ignore[type-arg]  # older releases of Click have no parameter
    """A type of option value."""


class Pool(_Type):
    """A number of tokens, 'auto', or 'off' (None)."""

    name = "tokens|auto|off"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | Literal["auto", "off"]:
        text = str(value).strip().lower()
        if text == "auto" or text == "off":
            return text  # type: ignore[return-value]
        if text.isdecimal() and int(text) > 0:
            return int(text)
        self.fail(f"{value!r} is not a number of tokens, 'auto' or 'off'", param, ctx)


class Layers(_Type):
    """A number of layers, 'all' (-1) or 'auto'."""

    name = "n|auto|all"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | Literal["auto"]:
        text = str(value).strip().lower()
        if text == "auto":
            return "auto"
        if text in ("all", "-1"):
            return -1
        if text.isdecimal():
            return int(text)
        self.fail(f"{value!r} is not a number of layers, 'auto' or 'all'", param, ctx)


class Size(_Type):
    """Bytes, with an optional K, M, G or T (powers of 1024)."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = _SIZE.fullmatch(str(value).strip())
        if match is None:
            self.fail(f"{value!r} is not a size: write bytes, or 512M, 8G", param, ctx)
        return int(float(match[1]) * (1 << _SHIFT[match[2].upper()]))


class Pin(_Type):
    """A half-open range of tokens, LO:HI."""

    name = "lo:hi"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        lo, _, hi = str(value).partition(":")
        if not (lo.isdecimal() and hi.isdecimal() and int(lo) < int(hi)):
            self.fail(f"{value!r} is not a range: write LO:HI with LO < HI, as in 0:512", param, ctx)
        return int(lo), int(hi)


class TokenLimit(_Type):
    """A number of tokens of at least 1, or -1 for no limit."""

    name = "n"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).strip()
        if text == "-1" or (text.isdecimal() and int(text) > 0):
            return int(text)
        self.fail(f"{value!r} is not a number of tokens (-1: no limit)", param, ctx)
