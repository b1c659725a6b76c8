"""`kvflash-run snapshot verify FILE...`: is it sound?"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from ..errors import KVFlashError
from ..snapshot import inspect
from .terminal import Progress, size_text, stderr_is_terminal


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but errors.")
@click.pass_context
def verify(ctx: click.Context, *, files: tuple[Path, ...], quiet: bool) -> None:
    """Read all of FILE and check every checksum.

    The exit code is 1 if a file is no snapshot or is damaged. Compressed files need the package
    zstandard.
    """
    failed = False
    for path in files:
        progress = Progress(
            shown=stderr_is_terminal() and not quiet, doing=f"checking {path}", unit="MiB", speed="MiB/s"
        )
        try:
            size = inspect.verify(path, partial(_show, progress))
        except KVFlashError as error:
            failed = True
            progress.erase()
            click.secho(f"Error: {error}", err=True, fg="red")
            continue
        progress.erase()
        if not quiet:
            click.echo(f"{click.format_filename(path)}: sound, {size_text(size)}")
    ctx.exit(1 if failed else 0)


def _show(progress: Progress, done: int, total: int) -> None:
    progress.update(done >> 20, total >> 20)
