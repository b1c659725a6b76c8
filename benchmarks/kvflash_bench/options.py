"""How the values of options are written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import click

from kvflash_ggml import notation
from kvflash_ggml.errors import KVFlashError


class Numbers(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Whole numbers with an optional K suffix (1,024), separated by commas."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(x[:-1]) * 1024 if x[-1] in "kK" else int(x) for x in value.split(","))
        except (ValueError, IndexError):
            self.fail(f"{value!r} is not a list of numbers such as 4K,64K", param, ctx)


class Bytes(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A size in bytes, with an optional K, M, G or T."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else notation.size(value)
        except ValueError as err:
            self.fail(str(err), param, ctx)


class Shares(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Per cents, separated by commas."""

    name = "per cents"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            shares = tuple(float(x) for x in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of per cents such as 6.25,3", param, ctx)
        if not all(0 <= x <= 100 for x in shares):
            self.fail(f"{value!r}: per cents lie between 0 and 100", param, ctx)
        return shares


class Factors(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Numbers above 0, separated by commas."""

    name = "factors"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            factors = tuple(float(x) for x in value.split(","))
        except ValueError:
            factors = ()
        if not factors or not all(0 < x < 1000 for x in factors):
            self.fail(f"{value!r} is not a list of numbers between 0 and 1000 such as 0.5,1,3", param, ctx)
        return factors


class Names(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Words, separated by commas."""

    name = "names"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        return value if isinstance(value, tuple) else tuple(x.strip() for x in value.split(",") if x.strip())


class Number(Numbers):
    """A whole number with an optional K suffix."""

    name = "number"

    def __init__(self, what: str = "one") -> None:
        self._what = what

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # type: ignore[override]
        if isinstance(value, int):
            return value
        numbers = super().convert(value, param, ctx)
        if len(numbers) != 1:
            self.fail(f"{value!r}: {self._what} at a time", param, ctx)
        return numbers[0]


class Fractions(Shares):
    """Per cents, separated by commas, which are handed on as numbers from 0 to 1."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(share / 100 for share in super().convert(value, param, ctx))


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Show what the user can mend without a traceback."""
    try:
        yield
    except KVFlashError as err:
        raise click.ClickException(str(err)) from err
