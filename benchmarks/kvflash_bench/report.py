"""What every benchmark prints: a table for people, then one JSON document as the last line of stdout."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
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


def document(data: dict[str, Any]) -> None:
    click.echo(json.dumps(data))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 10 else f"{value:,.1f}"
    if value is None:
        return "-"
    return f"{value:,}" if type(value) is int else str(value)  # True is an int too
