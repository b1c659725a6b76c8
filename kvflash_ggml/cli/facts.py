"""What files hold: in rows for people, or as one JSON document."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import click

from ..errors import KVFlashError

_WIDTH = 13

Facts = TypeVar("Facts")
"""A dataclass that describes a file."""


def tell(
    files: Iterable[Path], describe: Callable[[Path], Facts], rows: Callable[[Facts], object], *, as_json: bool
) -> bool:
    """Describe each of the files on stdout. What is wrong with one goes to stderr; True if nothing was with any.

    rows: tells of a file for people, below its name.
    """
    documents: list[dict[str, Any]] = []
    sound = True
    for path in files:
        try:
            facts = describe(path)
        except (KVFlashError, OSError) as error:
            sound = False
            click.secho(f"Error: {error}", err=True, fg="red")
            documents.append({"path": str(path), "error": str(error)})
            continue
        documents.append({**asdict(facts), "path": str(path)})  # type: ignore[call-overload]
        if not as_json:
            click.echo(click.format_filename(path))
            rows(facts)
    if as_json:
        click.echo(json.dumps(documents, indent=2))
    return sound


def row(name: str, text: str) -> None:
    """One of the rows below a file's name."""
    click.echo(f"  {name:{_WIDTH}}{text}")
