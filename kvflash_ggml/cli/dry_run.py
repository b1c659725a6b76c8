"""`kvflash-run MODEL --dry-run`: what would go where, and whether it fits. No weight is read."""

from __future__ import annotations

import json
import shlex
from typing import Any

import click

from ..errors import DoesNotFit

DOES_NOT_FIT = 3
"""The exit code."""


def dry_run(path: str, settings: dict[str, Any], *, as_json: bool) -> int:
    """Print the table, or a document, for these keywords of `Llama`. The exit code: 0, or DOES_NOT_FIT."""
    found = predicted(path, settings)
    if as_json:
        click.echo(json.dumps({"model": path, **found}, ensure_ascii=False))
    else:
        click.echo("\n".join(lines(path, found)))
    return 0 if found["fits"] else DOES_NOT_FIT


def predicted(path: str, settings: dict[str, Any]) -> dict[str, Any]:
    """A placement as a document, its "table" and whether it "fits"; if not, "why"."""
    from ..llama.fitting import without_loading
    from ..placement.table import document, table

    try:
        placement, devices = without_loading(path, settings)
    except DoesNotFit as error:
        return {"fits": False, "device": error.device, "why": str(error)}
    return {"fits": True, "table": table(placement, devices), **document(placement, devices)}


def lines(path: str, found: dict[str, Any]) -> list[str]:
    """What `predicted` has found, for people."""
    if not found["fits"]:
        return [f"does not fit: {found['why']}"]
    stock = f"llama.cpp, with a full cache: {shlex.join(['llama-cli', '-m', path, *found['options']])}"
    return [*found["table"].split("\n"), stock]
