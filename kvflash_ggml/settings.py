"""A setting is said once: at the field of a dataclass that holds it.

The field has its bounds, its help, and how text becomes its value. Options, variables and docstrings are made of it.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from numbers import Integral, Real
from typing import Any, TypeVar

from . import notation
from .errors import ConfigError

T = TypeVar("T")

_KEY = "setting"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How one field is given. kind: str, int, float, bool, Path, the words to choose from, or a reader of text.

    A reader raises ValueError for a text that it does not take. flags: on the command line; none for `--` and the
    field's name. least, most: bounds, included unless `above`. many: it may be given several times. exists: the path
    must. variable: of the environment, where it is not KVFLASH_ and the first long flag; "" for none. shown: the help
    names the default.
    """

    kind: Any
    help: str
    default: Any = None
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    least: float | None = None
    most: float | None = None
    above: bool = False
    many: bool = False
    exists: bool = False
    variable: str | None = None
    section: str | None = None
    shown: bool = True

    def flags_of(self, name: str) -> tuple[str, ...]:
        """Return its flags, for the field of this name."""
        has_long = any(flag.startswith("--") for flag in self.flags)
        return self.flags if has_long else (*self.flags, f"--{name.replace('_', '-')}")

    def variable_of(self, name: str) -> str:
        """Return its variable, for the field of this name."""
        if self.variable is not None:
            return self.variable
        return f"KVFLASH_{self.long_flag(name)[2:].removeprefix('kvflash-').replace('-', '_').upper()}"

    def long_flag(self, name: str) -> str:
        """Return the first of its long flags, for the field of this name."""
        return next(flag for flag in self.flags_of(name) if flag.startswith("--")).partition("/")[0]

    def problem(self, value: Any) -> str | None:
        """Say what a number has to be that this one is not, None where it fits."""
        if self.least is None:
            return None
        whole, most = self.kind is not float, math.inf if self.most is None else self.most
        right = is_whole(value) if whole else isinstance(value, Real) and not isinstance(value, bool)
        if right and (self.least < value if self.above else self.least <= value) and value <= most:
            return None
        bounds = f"{'above' if self.above else 'of at least'} {self.least}"
        if self.most is not None:
            bounds += f" and at most {self.most}"
        return f"{'a whole number' if whole else 'a number'} {bounds}{', or None' if self.default is None else ''}"

    def read(self, text: str) -> Any:
        """Read the value that a variable says. ValueError if it cannot be one."""
        read: Callable[[str], Any] = (
            str if isinstance(self.kind, tuple) else notation.switch if self.kind is bool else self.kind
        )
        return tuple(read(word) for word in text.split()) if self.many else read(text)


def setting(kind: Any, *flags: str, help: str, default: Any = None, **more: Any) -> Any:
    """Make a field of a dataclass that can be given by options, variables or keywords. more: of `Setting`."""
    return field(default=default, metadata={_KEY: Setting(kind=kind, flags=flags, help=help, default=default, **more)})


def settings(cls: type[Any]) -> dict[str, Setting]:
    """Return the settings of a dataclass by the names of their fields."""
    return {one.name: one.metadata[_KEY] for one in fields(cls) if _KEY in one.metadata}


def in_section(section: str) -> Callable[..., Any]:
    """Make `setting` for options below one heading."""
    return partial(setting, section=section)


def documented(cls: type[T]) -> type[T]:
    """Add what its settings mean to the docstring of a dataclass."""
    lines = (f"{name}: {re.sub(r' +', ' ', one.help)}" for name, one in settings(cls).items())
    told = [
        textwrap.fill(line, 120, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False)
        for line in lines
    ]
    cls.__doc__ = "\n".join([(cls.__doc__ or "").rstrip(), *told])
    return cls


def check(values: object, what: str = "") -> None:
    """Raise ConfigError for a number out of its bounds, or a word that is none of its setting's.

    what: is named behind the setting.
    """
    for one in fields(values):  # type: ignore[arg-type]
        limits, value = one.metadata.get(_KEY), getattr(values, one.name)
        if limits is None or (value is None and one.default is None):
            continue
        if isinstance(limits.kind, tuple) and value not in limits.kind:
            raise ConfigError(f"{one.name}{what} is one of {', '.join(limits.kind)}, not {value!r}")
        if limits.kind is bool and not isinstance(value, bool):
            raise ConfigError(f"{one.name}{what} is True or False, not {value!r}")
        problem = limits.problem(value)
        if problem is not None:
            raise ConfigError(f"{one.name}{what} is {problem}, not {value!r}")


def is_whole(value: object) -> bool:
    """Tell whether a value is a whole number, numpy's included."""
    return isinstance(value, Integral) and not isinstance(value, bool)
