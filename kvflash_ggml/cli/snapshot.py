"""`kvflash-run snapshot`: files of saved sessions. Needs no model and no native library."""

from __future__ import annotations

import time
from pathlib import Path

import click

from ..errors import KVFlashError
from ..snapshot import inspect
from ..snapshot.inspect import SnapshotDescription, describe, removable
from .model import plain_errors
from .report import row, tell
from .sections import HELP, json_option, prune_options
from .terminal import Progress, size_text, stderr_is_terminal


@click.group(context_settings=HELP)
def snapshot() -> None:
    """Look at, check and tidy up the files that --snapshot writes."""


@snapshot.command(context_settings=HELP)
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@json_option("an object per file")
@click.pass_context
def info(ctx: click.Context, *, files: tuple[Path, ...], as_json: bool) -> None:
    """Say what FILE holds: model, text, policy, and where the bytes go.

    Only the directory and the tables are read; `snapshot verify` reads everything. The exit code is 1
    if a file is no snapshot or is damaged.
    """
    ctx.exit(0 if tell(files, describe, _rows, as_json=as_json) else 1)


def _rows(it: SnapshotDescription) -> None:
    saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(it.saved_at))
    row("file", f"{it.kind}, format {it.version}, {size_text(it.bytes)}, saved {saved}")
    row("model", f"{_said(it.architecture)}, fingerprint {_said(it.model)}, llama.cpp {_said(it.build)}")
    row("text", f"{_said(it.tokens)} tokens in {_said(it.chunks)} chunks, {_said(it.resident)} of them resident")
    row("pool", f"{_said(it.pool)} of {_said(it.n_ctx)} tokens, policy {_said(it.policy)}")
    row("compression", _compression(it))
    largest = sorted(it.sections.items(), key=lambda item: -item[1])
    row("sections", ", ".join(f"{name} {size_text(size)}" for name, size in largest))


def _compression(it: SnapshotDescription) -> str:
    if not it.compressed:
        return "none"
    whole = "" if it.raw_bytes is None else f", {size_text(it.raw_bytes)} in memory"
    return f"Zstandard, {it.compressed} of {it.pages} pages{whole}"


def _said(value: object) -> str:
    return "?" if value is None else str(value)


@snapshot.command(context_settings=HELP)
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
        shown = stderr_is_terminal() and not quiet
        try:
            with Progress(shown=shown, doing=f"checking {path}", unit="MiB") as progress:
                size = inspect.verify(path, progress.update)
        except KVFlashError as error:
            failed = True
            click.secho(f"Error: {error}", err=True, fg="red")
            continue
        if not quiet:
            click.echo(f"{click.format_filename(path)}: sound, {size_text(size)}")
    ctx.exit(1 if failed else 0)


@snapshot.command(context_settings=HELP)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@prune_options("snapshots")
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
