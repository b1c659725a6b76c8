"""`kvflash-convert verify FILE`: does this drafter fit this target?"""

from __future__ import annotations

from pathlib import Path

import click

from ..convert import verify as checks
from .convert_options import FILE, HELP, quiet_option, rope_option, target_option, working


@click.command(context_settings=HELP)
@click.argument("file", type=FILE, metavar="FILE")
@target_option("The model that it drafts for; without one the file is checked by itself.")
@rope_option
@quiet_option
def verify(*, file: Path, target: Path | None, rope_differs: bool, quiet: bool) -> None:
    """Check a drafter's file: its keys, its tensors, every value, and whether it fits its target.

    The exit code is 1 if something is wrong, and the message says what was found, what was wanted, and
    what helps.
    """
    with working(f"checking {file}", quiet=quiet) as progress:
        words = checks.verify(file, model=target, rope_differs=rope_differs, progress=progress)
    if not quiet:
        click.echo(f"{click.format_filename(file)}: {words}" + ("" if target is None else f"; it fits {target.name}"))
