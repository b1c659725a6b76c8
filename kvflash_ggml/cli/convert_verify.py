"""`kvflash-convert verify FILE`: does this drafter fit this target?"""

from __future__ import annotations

from pathlib import Path

import click

from ..gguf import verify as checks
from .convert_measure import MeasureOptions, check_library, measure, measure_options
from .convert_options import FILE, HELP, quiet_option, rope_option, target_option, working


@click.command(context_settings=HELP)
@click.argument("file", type=FILE, metavar="FILE")
@target_option("The model that it drafts for; without one the file is checked by itself.")
@rope_option
@click.option(
    "--measure",
    "measured",
    is_flag=True,
    help="Also how many drafted tokens --target accepts. Needs the native library.",
)
@measure_options
@quiet_option
def verify(
    *, file: Path, target: Path | None, rope_differs: bool, measured: bool, measuring: MeasureOptions, quiet: bool
) -> None:
    """Check a drafter's file: its keys, its tensors, every value, and whether it fits its target.

    The exit code is 1 if something is wrong, and the message says what was found, what was wanted, and
    what helps. A drafter that kvflash-convert has made or bound says which model it was trained for, and
    no other one fits. Of any other drafter only the shape is checked: --measure tells how many of its tokens
    --target accepts, and the exit code is 1 if it accepts none.
    """
    if measured and target is None:
        raise click.UsageError("--measure needs a --target, the model that accepts or not")
    with working(f"checking {file}", quiet=quiet) as progress:
        if measured:
            check_library()
        words = checks.verify(file, model=target, rope_differs=rope_differs, progress=progress)
    if measured and target is not None:
        measure({"draft": file}, target=target, measuring=measuring, quiet=quiet)
    if not quiet:
        click.echo(f"{click.format_filename(file)}: {words}")
