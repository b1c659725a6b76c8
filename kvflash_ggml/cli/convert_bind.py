"""`kvflash-convert bind IN OUT`: which model a drafter was trained for, written into its file."""

from __future__ import annotations

from pathlib import Path

import click

from ..convert import bind as binding
from .convert_options import FILE, HELP, quiet_option, rope_option, target_option, working
from .terminal import note, size_text


@click.command(context_settings=HELP)
@click.argument("source", type=FILE, metavar="IN")
@click.argument("out", type=FILE, metavar="OUT")
@target_option("The model that it was trained for.", required=True)
@rope_option
@quiet_option
def bind(*, source: Path, out: Path, target: Path, rope_differs: bool, quiet: bool) -> None:
    """Write into a drafter's file which model it was trained for.

    For drafters that other tools have made. The architecture and a signature of the embedding of --target
    become keys of the file, and whoever opens the drafter beside another model gets an error. Tensors stay
    as they are. Whether it was trained for --target is yours to know: verify --measure helps.
    """
    with working(f"writing {out}", quiet=quiet) as progress:
        words = binding.bind(source, out, model=target, rope_differs=rope_differs, progress=progress)
    if not quiet:
        note(f"{words}\nwritten to {out}, {size_text(out.stat().st_size)}")
