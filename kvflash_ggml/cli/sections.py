"""Makes options of settings, under headings, and commands that print their help under those headings."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from .. import notation
from ..settings import Setting, settings
from .terminal import note

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)

HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
"""`context_settings` of every verb."""

ON_OFF = "on|off"
"""The metavar of a flag that may have one of these words behind it, as in llama.cpp."""

_EVERYTHING = f"{__name__}.everything"


class SectionOption(click.Option):
    """An option listed under `section` in the help."""

    def __init__(self, *args: Any, section: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section or "Other"

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Name the option, and its variable where the value comes from there."""
        hint = super().get_error_hint(ctx)
        source = None if ctx is None or self.name is None else ctx.get_parameter_source(self.name)
        return f"{hint} (from {self.envvar})" if source is click.core.ParameterSource.ENVIRONMENT else hint

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Leave out the range: an error names it, and the help stays readable."""
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        return extra


class SectionCommand(click.Command):
    """A command whose help groups the options by section, in order of appearance.

    common: the options that `--help` shows, by any of their names; `--help-all` shows every option. Without names there
    is no `--help-all`.
    """

    def __init__(self, *args: Any, common: Collection[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._common = {*common}
        if common:
            self._common |= {"--help", "--help-all"}
            self.params.append(
                SectionOption(
                    ["--help-all"],
                    is_flag=True,
                    is_eager=True,
                    expose_value=False,
                    allow_from_autoenv=False,
                    callback=_show_everything,
                    help="Show every option and exit; --help shows the common ones.",
                )
            )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does, with a warning for a value that a later one replaces."""
        if not ctx.resilient_parsing:
            args = self._words(ctx, args)
        given = Counter(self.make_parser(ctx).parse_args(args=[*args])[2]) if not ctx.resilient_parsing else {}
        for param, count in given.items():
            if count > 1 and isinstance(param, click.Option) and not (param.multiple or param.is_flag):
                names = " or ".join(param.opts)
                note(f"warning: {names} is given {count} times, and only the last one counts: leave out the others")
        return super().parse_args(ctx, args)

    def _words(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Return the words as click takes them: llama.cpp's `-fit off` becomes `-no-fit`.

        Raise NoSuchOption for a word such as -xyz, whose end click would take for the text of -x.
        """
        options = (param for param in self.params if isinstance(param, click.Option))
        named = {name: one for one in options for name in (*one.opts, *one.secondary_opts)}
        before: click.Option | None = None
        words: list[str] = []
        for i, word in enumerate(args):
            if word == "--":
                return [*words, *args[i:]]
            if before is not None and before.is_flag and words[-1] in before.opts and word in _switches(before):
                if word == "off":
                    words[-1:] = before.secondary_opts[:1]
                before = None
                continue
            words.append(word)
            if before is not None and not before.is_flag:
                before = None  # the word is its value
                continue
            before, first = named.get(word), named.get(word[:2])
            if before is None and first is not None and not first.is_flag and re.fullmatch(r"-[a-zA-Z]{2,}", word):
                raise click.NoSuchOption(word, ctx=ctx)
        return words

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            shown = not self._common or _EVERYTHING in ctx.meta or self._common & {*param.opts}
            if record is not None and shown:
                sections.setdefault(getattr(param, "section", "Other"), []).append(record)
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def _switches(flag: click.Option) -> list[str]:
    return flag.metavar.split("|") if flag.metavar else []


def _show_everything(ctx: click.Context, _param: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        ctx.meta[_EVERYTHING] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


class Written(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # older releases of Click have no parameter
    """A value as `read` understands its text. The ValueError for another text is what the user sees."""

    name = "text"

    def __init__(self, read: Callable[[str], Any]) -> None:
        self.read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self.read(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


class ModelPath(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """The path of a model as it is typed; the model is looked for when it is opened. Shells complete files."""

    name = "path"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(incomplete, type="file")]


MODEL_FILE = ModelPath()


class Place(click.Path):  # type: ignore[type-arg,unused-ignore]
    """A path; an empty text, as of a variable that is not set, would be the folder where the program runs."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("an empty text is no path: name one, or leave the option out", param, ctx)
        return super().convert(value, param, ctx)


class Number(click.FloatRange):
    """A number in a range; NaN, which no comparison keeps out, is none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


class Tokens(click.IntRange):
    """A number of tokens in a range, as 16384 or 16K."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return super().convert(Written(notation.tokens).convert(value, param, ctx), param, ctx)


def option(section: str) -> Callable[..., Callable[[F], F]]:
    """Make `click.option` for one section."""

    def make(*declarations: str, **attributes: Any) -> Callable[[F], F]:
        return click.option(*declarations, cls=SectionOption, section=section, **attributes)

    return make


def json_option(what: str) -> Callable[[F], F]:
    """Make the option --json of a verb that lists things. what: the things, as "an object per file"."""
    return click.option("--json", "as_json", is_flag=True, help=f"One JSON document on stdout: a list, {what}.")


def prune_options(what: str) -> Callable[[F], F]:
    """Make the options of a verb that removes things of a kind `what` by age or size."""

    def decorate(function: F) -> F:
        for one in (
            click.option("--dry-run", is_flag=True, help="Only say what would be removed."),
            click.option(
                "--larger-than",
                type=Written(notation.size),
                metavar="SIZE",
                help=f"Also the oldest {what}, until the rest takes no more than that together, as 20G.",
            ),
            click.option(
                "--older-than", type=click.FloatRange(min=0), metavar="DAYS", help=f"Also {what} saved longer ago."
            ),
        ):
            function = one(function)
        return function

    return decorate


def collected(name: str, into: type[Any], *, also: type[Any] | None = None) -> Callable[[F], F]:
    """Make options of the settings of the dataclass `into`, and pass one `into` as `name`.

    also: a dataclass whose settings become options too; `into` gets their values as one dictionary `fields`.
    """
    own, others = settings(into), {} if also is None else settings(also)

    def decorate(function: F) -> F:
        @wraps(function)
        def call(**values: Any) -> Any:
            fields = {field: values.pop(params[field]) for field in others}
            given = {field: values.pop(params[field]) for field in own}
            values[name] = into(**given, **({} if also is None else {"fields": fields}))
            return function(**values)

        params: dict[str, str] = {}
        decorated: Any = call
        for field, one in reversed((own | others).items()):
            decorated = _option(field, one)(decorated)
            params[field] = decorated.__click_params__[-1].name
        return decorated  # type: ignore[no-any-return]

    return decorate


def _option(field: str, one: Setting) -> Callable[[F], F]:
    return option(one.section or "Other")(*one.flags_of(field), help=one.help, **_attributes(field, one))


def _attributes(field: str, one: Setting) -> dict[str, Any]:
    """Return the arguments of `click.option` for a setting."""
    variable = one.variable_of(field)
    found: dict[str, Any] = {"envvar": variable or None, "allow_from_autoenv": bool(variable)}
    found["default"] = None if one.many else one.default
    if one.kind is bool:
        pair = any("/" in flag for flag in one.flags)
        return {**found, "metavar": one.metavar} if pair else {**found, "is_flag": True}
    found |= {"type": _type(one), "metavar": one.metavar or _METAVARS.get(one.kind), "multiple": one.many}
    return {**found, "show_default": one.shown and one.default is not None and not one.many}


_METAVARS: dict[Any, str] = {int: "N", notation.tokens: "N", float: "X"}


def _type(one: Setting) -> click.ParamType:  # type: ignore[type-arg,unused-ignore]
    if isinstance(one.kind, click.ParamType):
        return one.kind
    if isinstance(one.kind, tuple):
        return click.Choice(one.kind)
    if one.kind is int and one.least is None:
        return click.INT
    if one.kind is int:
        return click.IntRange(one.least, one.most)  # type: ignore[arg-type]
    if one.kind is notation.tokens:
        return Tokens(one.least, one.most)  # type: ignore[arg-type]
    if one.kind is float:
        return Number(one.least, one.most, min_open=one.above)
    if one.kind is Path:
        return Place(exists=one.exists, dir_okay=one.metavar != "FILE", file_okay=one.metavar != "DIR", path_type=Path)
    return click.STRING if one.kind is str else Written(one.kind)
