"""How the values of options are written: pool sizes, layers, byte sizes, pins."""

from __future__ import annotations

import math
from typing import Any, Literal

import click

from .. import notation, policy
from ..config import SpecConfig
from ..errors import ConfigError


class _Type(click.ParamType):  # type: ignore[type-arg]  # older releases of Click have no parameter
    """A type of option value."""


class Pool(_Type):
    """A number of tokens, a size in bytes, 'auto', or 'off', as it was written."""

    name = "tokens|size|auto|off"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value).strip().lower()
        try:
            notation.pool(text)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return text


class Policy(click.Choice):  # type: ignore[type-arg,unused-ignore]
    """The name of a policy: of this package, or of another one that is installed."""

    def __init__(self) -> None:
        super().__init__(policy.names())

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            policy.check(str(value))
        except ConfigError as error:
            self.fail(str(error), param, ctx)
        return str(value)


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


class Number(click.FloatRange):
    """A number in a range; NaN, which no comparison keeps out, is none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


class Size(_Type):
    """Bytes, with an optional K, M, G or T (powers of 1024)."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return notation.size(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Ceiling(_Type):
    """Bytes, as `Size`, or 'auto'."""

    name = "size|auto"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | Literal["auto"]:
        try:
            return notation.ceiling(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Calibrate(_Type):
    """On, off, or a file."""

    name = "on|off|file"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> bool | str:
        return value if isinstance(value, bool) else notation.calibrate(str(value))


class Drafts(_Type):
    """Who drafts, as it was written."""

    name = "auto|none|names"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value).strip()
        try:
            SpecConfig.read(text)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return text


class Pin(_Type):
    """A half-open range of tokens, LO:HI."""

    name = "lo:hi"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        try:
            return notation.pin(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class TokenLimit(_Type):
    """A number of tokens of at least 1, or -1 for no limit."""

    name = "n"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).strip()
        if text == "-1" or (text.isdecimal() and int(text) > 0):
            return int(text)
        self.fail(f"{value!r} is not a number of tokens (-1: no limit)", param, ctx)
