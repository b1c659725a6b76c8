"""Options that carry a heading, and a command that prints its help under those headings."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar

import click

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)

_EVERYTHING = f"{__name__}.everything"


class SectionOption(click.Option):
    """An option listed under `section` in the help."""

    def __init__(self, *args: Any, section: str = "Other", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Without the range: an error names it, and the help stays readable."""
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


def _show_everything(ctx: click.Context, _param: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        ctx.meta[_EVERYTHING] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def option(section: str) -> Callable[..., Callable[[F], F]]:
    """`click.option` for one section."""

    def make(*declarations: str, **attributes: Any) -> Callable[[F], F]:
        return click.option(*declarations, cls=SectionOption, section=section, **attributes)

    return make


def collected(name: str, into: type[Any], *options: Callable[[F], F]) -> Callable[[F], F]:
    """A decorator that adds `options` and passes their values as one `into` named `name`."""
    names = [field.name for field in fields(into)]

    def decorate(function: F) -> F:
        @wraps(function)
        def call(**values: Any) -> Any:
            values[name] = into(**{field: values.pop(field) for field in names})
            return function(**values)

        decorated: Any = call
        for add in reversed(options):
            decorated = add(decorated)
        return decorated  # type: ignore[no-any-return]

    return decorate
