#!/usr/bin/env python3
"""Writes docs/api.md: public names with their docstrings, and every environment variable. Needs the built library."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
PAGE = REPO / "docs" / "api.md"

if str(REPO) not in sys.path:  # run by hand; tests may be run against another package than the checkout's
    sys.path.insert(0, str(REPO))

import click  # noqa: E402

import kvflash_ggml  # noqa: E402
from kvflash_ggml import cli, env  # noqa: E402
from kvflash_ggml.batching.engine import Completion  # noqa: E402
from kvflash_ggml.batching.messages import Finished, Piece, Usage  # noqa: E402
from kvflash_ggml.llama.stats import DeviceStats, PoolStats, ReadStats  # noqa: E402
from kvflash_ggml.placement.sizes import Placement  # noqa: E402
from kvflash_ggml.policy.qk import Reason  # noqa: E402
from kvflash_ggml.speculation.loop import SpecStats  # noqa: E402
from kvflash_ggml.trace.recorder import Moment, Trace  # noqa: E402

HEAD = """\
# API

This page lists what `kvflash_ggml` exports, the values that it returns, its errors, and every environment variable.
`python scripts/api_page.py` writes it from the docstrings and the options. `Llama` has every method of
`llama_cpp.Llama` too; the table below it has only those that this package adds or changes.
"""

VALUES = {
    "`llm.kvflash.last`": ReadStats,
    "`llm.kvflash.spec`": SpecStats,
    "`llm.kvflash.record()`": Trace,
    "`trace.moments`": Moment,
    "`llm.kvflash.reasons()`": Reason,
    "`llm.kvflash.devices`": DeviceStats,
    "`llm.placement`": Placement,
    "`engine.generate_many()`": Completion,
    "`engine.generate()`": Piece,
    "`engine.generate()`, at its end": Finished,
    "`usage` of an answer": Usage,
}
"""Values that calls return, and where they come from."""

NO_OPTIONS = {
    "KVFLASH_KERNELS": "`stock`: leaves out patches 0020, 0029, 0049 and 0066. Hopper GPUs attend and multiply as in"
    " llama.cpp then, but for steps of 6 to 8 rows of K-quants, and CPUs attend as there. Another value is an error.",
    "KVFLASH_LANE": "`stream` or `sync`: all devices move pages that way, for tests.",
    "KVFLASH_PORTABLE": "1: build for every CPU of this architecture.",
    "KVFLASH_RPC_TIMEOUT": "Seconds (1 to 86,400) until a silent server of devices counts as lost; 120 unless set.",
}
"""Variables that C++ or the build reads. Those of Python are in env.py."""


def render() -> str:
    """Return the page."""
    Llama = kvflash_ggml.Llama
    parts = [HEAD]
    for name in sorted(set(kvflash_ggml.__all__) - {"errors", "__version__"}):
        value = getattr(kvflash_ggml, name)
        parts.append(_section(f"{name}{_signature(value)}" if name != "Llama" else name, value))
        if value is kvflash_ggml.Engine:
            parts.append(_members(value))
        if value is Llama:
            parts += [_members(Llama), "### `llm.kvflash`\nThe state of the pool.\n\n" + _members(PoolStats)]
    rows = (f"| {name} | `{_fields(cls)}` | {_cell(inspect.getdoc(cls))} |" for name, cls in VALUES.items())
    parts.append(
        _table("## Values\nWhat properties and calls return. The classes need no import.", ["from", "fields", ""], rows)
    )
    found = inspect.getmembers(kvflash_ggml.errors, inspect.isclass)
    errors = [(name, cls) for name, cls in found if issubclass(cls, kvflash_ggml.KVFlashError)]
    rows = (
        f"| `{name}` | {', '.join(base.__name__ for base in cls.__bases__)} | {_first(cls)} |" for name, cls in errors
    )
    parts.append(
        _table("## `errors`\nEvery error of `kvflash_ggml.errors` is a `KVFlashError`.", ("error", "is a", ""), rows)
    )
    return "\n".join(parts) + "\n" + _variables()


def _section(title: str, value: Any) -> str:
    return f"## `{title}`\n```text\n{inspect.getdoc(value)}\n```\n"


def _members(cls: type) -> str:
    """A table of what this package defines: a name once, as the object has it."""
    ours = [base for base in cls.__mro__ if base.__module__.startswith("kvflash_ggml")]
    names = sorted({name for base in ours for name in vars(base) if not name.startswith("_")})
    rows = []
    for name in names:
        value = inspect.getattr_static(cls, name)
        if callable(value) or isinstance(value, property):
            rows.append(f"| `{name}{'' if isinstance(value, property) else _signature(value)}` | {_first(value)} |")
    return _table("", ("member", ""), rows)


def _table(head: str, columns: Iterable[str], rows: Iterable[str]) -> str:
    columns = list(columns)
    lines = [head, ""] if head else []
    return "\n".join([*lines, f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|", *rows, ""])


def _signature(value: Any) -> str:
    if not callable(value):
        return ""
    try:
        found = inspect.signature(value)
    except ValueError:  # of a class in C
        return ""
    names = [one.replace(annotation=inspect.Parameter.empty) for one in found.parameters.values() if one.name != "self"]
    return str(found.replace(parameters=names, return_annotation=inspect.Signature.empty))


def _first(value: Any) -> str:
    """The first paragraph of a docstring, as a cell."""
    return _cell((inspect.getdoc(value) or "").partition("\n\n")[0])


def _cell(text: str | None) -> str:
    return re.sub(r"\s+", " ", text or "").replace("|", "\\|")


def _fields(cls: type) -> str:
    """The class, and what its objects have: fields, or members where their making is not the user's."""
    names = inspect.signature(cls).parameters if hasattr(cls, "__match_args__") else vars(cls)
    return f"{cls.__name__}({', '.join(name for name in names if not name.startswith('_'))})"


def _variables() -> str:
    own = dict(NO_OPTIONS)
    for _, function in inspect.getmembers(env, inspect.isfunction):
        if match := re.match(r"Re(?:turn|ad) (KVFLASH_\w+): (.*)", _first(function)):
            own[match[1]] = match[2][0].upper() + match[2][1:]
    options: dict[str, tuple[str, set[str]]] = {}
    for verb, variable, option in _options(cli.main, ""):
        flag = next(name for name in option.opts if name.startswith("--"))
        options.setdefault(variable, (flag, set()))[1].add(verb)
    head = "## Environment variables\n\nThese have no option:"
    text = _table(head, ("variable", ""), (f"| `{name}` | {own[name]} |" for name in sorted(own)))
    rows = (f"| `{name}` | `{flag}` | {', '.join(sorted(verbs))} |" for name, (flag, verbs) in sorted(options.items()))
    head = "These give an option of `kvflash-run`. The option's text in `--help-all` says what it means:"
    return f"{text}\n{_table(head, ('variable', 'option', 'verbs'), rows)}"


def _options(command: click.Command, verb: str) -> Iterator[tuple[str, str, click.Option]]:
    prefix = command.context_settings.get("auto_envvar_prefix")
    for param in command.params:
        if isinstance(param, click.Option) and not param.hidden:
            if isinstance(param.envvar, str):
                yield verb, param.envvar, param
            elif prefix and param.allow_from_autoenv:
                yield verb, f"{prefix}_{param.name}".upper(), param
    if isinstance(command, click.Group):
        for name, below in sorted(command.commands.items()):
            yield from _options(below, f"{verb} {name}".strip())


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(PAGE.relative_to(REPO))
