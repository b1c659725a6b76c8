"""The names that users rely on, as JSON values: options, routes, metrics, errors and signatures."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import click

import kvflash_ggml
from kvflash_ggml import errors

from .asgi import Client
from .fake_model import FakeModel, FakePrompts

REPO = Path(__file__).parents[2]
SOURCES = (
    ("kvflash_ggml", "*.py"),
    ("benchmarks", "*.py"),
    ("kvflash_ggml", "*.cpp"),
    ("scripts", "*.py"),
    ("patches", "*.patch"),
)

PROGRAMS = {
    "kvflash-run": ("kvflash_ggml.cli", "main"),
    "kvflash-convert": ("kvflash_ggml.cli.convert", "convert"),
    "kvflash-bench": ("kvflash_bench", "main"),
}


def without_a_library() -> dict[str, Any]:
    """The names that a process can list that has loaded no native library."""
    return {
        "options": {program: options(program) for program in PROGRAMS},
        "variables": variables(),
        "errors": {name: _bases(cls) for name, cls in inspect.getmembers(errors, _is_error)},
        "metrics": metrics(),
        "routes": routes(),
    }


def with_the_library() -> dict[str, Any]:
    """The names that exist once llama_cpp can be imported: signature by name, and what `llm.kvflash` answers."""
    found: dict[str, Any] = {}
    for name in kvflash_ggml.__all__:
        value = getattr(kvflash_ggml, name)
        if callable(value):
            found[name] = signature(value)
        if inspect.isclass(value) and not issubclass(value, Exception):
            found |= {f"{name}.{member}": signature(getattr(value, member)) for member in _members(value)}
    return {"names": sorted(kvflash_ggml.__all__), "signatures": found}


# --- commands


def options(program: str) -> dict[str, list[str]]:
    """Per verb, "" for the program itself: its options, and `<name>` for each argument."""
    room, name = PROGRAMS[program]
    return dict(_options(getattr(import_module(room), name)))


def _options(command: click.Command, verb: str = "") -> Iterator[tuple[str, list[str]]]:
    names = [
        word
        for param in command.params
        for word in ((*param.opts, *param.secondary_opts) if isinstance(param, click.Option) else (f"<{param.name}>",))
    ]
    yield verb, sorted(names)
    if isinstance(command, click.Group):
        for name, below in sorted(command.commands.items()):
            yield from _options(below, f"{verb} {name}".strip())


def variables() -> list[str]:
    """The environment variables of the options, and the names in quotes in any other source."""
    found = set()
    for room, name in PROGRAMS.values():
        found |= set(_variables(getattr(import_module(room), name)))
    for folder, pattern in SOURCES:
        for path in (REPO / folder).rglob(pattern):
            found |= set(re.findall(r"""["'](KVFLASH_[A-Z_]*[A-Z])["']""", path.read_text(encoding="utf-8")))
    return sorted(found)


def _variables(command: click.Command) -> Iterator[str]:
    prefix = command.context_settings.get("auto_envvar_prefix")
    for param in command.params:
        if isinstance(param.envvar, str):
            yield param.envvar
        elif prefix and isinstance(param, click.Option) and param.allow_from_autoenv:
            yield f"{prefix}_{param.name}".upper()
    if isinstance(command, click.Group):
        for below in command.commands.values():
            yield from _variables(below)


# --- the server


def routes() -> list[str]:
    """Method and path of each."""
    from starlette.routing import Route

    found = [route for route in _app().routes if isinstance(route, Route)]
    return sorted(f"{method} {route.path}" for route in found for method in route.methods or ())


def metrics() -> list[str]:
    """Names in /metrics: `name type`, and `name{label,...}` of each sample."""
    lines = asyncio.run(Client(_app()).get("/metrics")).body.decode().splitlines()
    types = {line.removeprefix("# TYPE ") for line in lines if line.startswith("# TYPE ")}
    samples = {re.sub(r'="[^"]*"', "", line.rpartition(" ")[0]) for line in lines if not line.startswith("#")}
    return sorted(types | samples)


def _app() -> Any:
    """The application of a server whose engine's thread never starts."""
    from kvflash_ggml.batching.scheduler import Scheduler
    from kvflash_ggml.server.app import make_app
    from kvflash_ggml.server.front import Front
    from kvflash_ggml.server.metrics import Metrics
    from kvflash_ggml.server.settings import ServerSettings

    found = Metrics()
    scheduler = Scheduler(FakeModel(), on_end=found.ended)
    found.attach(scheduler)
    return make_app(Front(ServerSettings(alias="fake"), scheduler, FakePrompts()), found)


# --- Python


def signature(value: Any) -> list[str]:
    """Parameters in their order: `name`, `name=` with a default, `*`, `/`, `*name` and `**name`. [] for a value."""
    if not callable(value):
        return []
    try:
        parameters = inspect.signature(value).parameters.values()
    except ValueError:  # of a class in C
        return []
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found: list[str] = []
    for one in parameters:
        if one.kind is inspect.Parameter.KEYWORD_ONLY and not any(word[0] == "*" for word in found):
            found.append("*")
        default = "" if one.default is inspect.Parameter.empty else "="
        found.append(f"{marks.get(one.kind, '')}{one.name}{default}")
    return found


def _members(cls: type) -> list[str]:
    """Public members that this package defines."""
    ours = [base for base in cls.__mro__ if base.__module__.startswith("kvflash_ggml")]
    return sorted({name for base in ours for name in vars(base) if not name.startswith("_")})


def public(value: object) -> list[str]:
    """Names of an object's public attributes."""
    return [name for name in dir(value) if not name.startswith("_")]


def _is_error(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, Exception) and value.__module__ == errors.__name__


def _bases(cls: type) -> list[str]:
    return sorted(base.__name__ for base in cls.__mro__[1:] if issubclass(base, Exception))


# --- comparing


def lost(wanted: Any, found: Any, where: str = "") -> list[str]:
    """What `wanted` has and `found` has not, as paths. Anything may be added, to a signature only with a default."""
    if isinstance(wanted, dict):
        if not isinstance(found, dict):
            return [where]
        return [
            line
            for key, value in wanted.items()
            for line in (lost(value, found[key], f"{where}/{key}") if key in found else [f"{where}/{key}"])
        ]
    if isinstance(wanted, list):
        if where.startswith("/signatures/"):
            return [] if _takes_all(wanted, found) else [f"{where}: ({', '.join(wanted)}) -> ({', '.join(found)})"]
        return [f"{where}/{item}" for item in wanted if item not in found]
    return [] if wanted == found else [f"{where}: {wanted} -> {found}"]


def _takes_all(before: list[str], after: list[str]) -> bool:
    """Does every call that fits the first signature fit the second?"""
    places, keywords, rest = _parts(before)
    new_places, new_keywords, new_rest = _parts(after)
    if not rest <= new_rest:
        return False
    for old, new in zip(places, new_places, strict=False):
        if old.strip("=") != new.strip("=") or (old.endswith("=") and not new.endswith("=")):
            return False
    if len(new_places) < len(places) or any(not name.endswith("=") for name in new_places[len(places) :]):
        return False
    known = {name.strip("="): name for name in (*new_places, *new_keywords)}
    for old in keywords:
        new = known.get(old.strip("="), "" if "**" not in new_rest else old)
        if not new or (old.endswith("=") and not new.endswith("=")):
            return False
    asked = {name.strip("=") for name in (*places, *keywords)}
    return all(name.endswith("=") or name in asked for name in new_keywords)


def _parts(words: list[str]) -> tuple[list[str], list[str], set[str]]:
    """Parameters by place, by keyword only, and which of `*` (of values) and `**` there are."""
    at = next((i for i, word in enumerate(words) if word[0] == "*"), len(words))
    rest = {"**" if word[:2] == "**" else "*" for word in words if word[0] == "*" and word != "*"}
    return words[:at], [word for word in words[at:] if word[0] != "*"], rest


def shape(value: Any, where: str = "") -> dict[str, str]:
    """The kind of each value in a JSON document by its path; that of a list's first item stands for all."""
    kinds = {dict: "object", list: "array", str: "string", bool: "bool", int: "number", float: "number"}
    found = {where or "/": kinds.get(type(value), "null")}
    if isinstance(value, dict):
        for key, below in value.items():
            found |= shape(below, f"{where}/{key}")
    if isinstance(value, list) and value:
        found |= shape(value[0], f"{where}/*")
    return found
