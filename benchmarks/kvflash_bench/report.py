"""What every benchmark prints: a table for people, then one JSON document as the last line of stdout."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from kvflash_ggml.native import library


def environment(device: str) -> dict[str, Any]:
    """Hardware and build, so that a figure is never without its conditions."""
    info = library.build_info()
    return {
        "device": device,
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "kvflash_ggml": info.get("version"),
        "llama_cpp_commit": info.get("llama_cpp_commit"),
        "backends": info.get("backends"),
    }


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Right-aligned columns on stdout."""
    text = [[_cell(value) for value in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in text) for i in range(len(header))]
    for row in text:
        click.echo("  ".join(value.rjust(width) for value, width in zip(row, widths, strict=True)))


def now_and_then(seconds: float = 10.0) -> Callable[[dict[str, float]], None]:
    """Says how far it is, in a line on stderr, and not more often than that."""
    said = began = time.monotonic()

    def tell(now: dict[str, float]) -> None:
        nonlocal said
        if time.monotonic() - said >= seconds:
            said = time.monotonic()
            click.echo(json.dumps({"seconds": round(said - began), **now}), err=True)

    return tell


def columns(names: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> None:
    """A table of some values of rows, under names for a reader; what a row lacks is a dash."""
    table(list(names.values()), [[row.get(key) for key in names] for row in rows])


def rows(found: Sequence[Mapping[str, Any]]) -> None:
    """A table of everything in rows of the same keys; nothing without rows."""
    if found:
        columns({key: key for key in found[0]}, found)


def told(verb: str, model: str, settings: Mapping[str, Any], device: str, **found: Any) -> None:
    """The last line: what was found, and under which conditions. settings: of the model, and the plan."""
    said = {"bench": verb, "model": Path(model).name, "options": settings, "environment": environment(device)}
    click.echo(json.dumps(said | found, default=str))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 10 else f"{value:,.1f}"
    if value is None:
        return "-"
    return f"{value:,}" if type(value) is int else str(value)  # True is an int too
