"""`kvflash-run snapshot prune FOLDER`: remove what is not needed any more."""

from __future__ import annotations

from pathlib import Path

import click

from .. import notation
from ..snapshot.inspect import removable
from .model import plain_errors
from .sections import Written
from .terminal import size_text


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--older-than", type=click.FloatRange(min=0), metavar="DAYS", help="Also snapshots saved longer ago.")
@click.option(
    "--larger-than",
    type=Written(notation.size),
    metavar="SIZE",
    help="Also the oldest snapshots, until those that are left take no more than that together, as 20G.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
def prune(*, folder: Path, older_than: float | None, larger_than: int | None, dry_run: bool) -> None:
    """Remove what killed saves have left in FOLDER, and snapshots by age or size.

    Only files that begin as snapshots do are touched, never links, other files or subfolders. A file that
    is being saved stays. Without options only the remains of killed saves go.
    """
    with plain_errors(verbose=False):
        files = removable(folder, older_than=older_than, larger_than=larger_than)
        for file in files:
            if not dry_run:
                file.path.unlink(missing_ok=True)
            click.echo(f"{file.why:9}  {size_text(file.bytes):>10}  {click.format_filename(file.path)}")
    total = size_text(sum(file.bytes for file in files))
    click.echo(f"{len(files)} files, {total} {'would be ' if dry_run else ''}removed", err=True)
