"""`kvflash-run snapshot info FILE...`: what is in a saved session."""

from __future__ import annotations

import time
from pathlib import Path

import click

from ..snapshot.inspect import Description, describe
from .facts import row, tell
from .terminal import size_text


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout: a list, an object per file.")
@click.pass_context
def info(ctx: click.Context, *, files: tuple[Path, ...], as_json: bool) -> None:
    """Say what FILE holds: model, text, policy, and where the bytes go.

    Only the directory and the tables are read; `snapshot verify` reads everything. The exit code is 1
    if a file is no snapshot or is damaged.
    """
    ctx.exit(0 if tell(files, describe, _rows, as_json=as_json) else 1)


def _rows(it: Description) -> None:
    saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(it.saved_at))
    row("file", f"{it.kind}, format {it.version}, {size_text(it.bytes)}, saved {saved}")
    row("model", f"{_said(it.architecture)}, fingerprint {_said(it.model)}, llama.cpp {_said(it.build)}")
    row("text", f"{_said(it.tokens)} tokens in {_said(it.chunks)} chunks, {_said(it.resident)} of them resident")
    row("pool", f"{_said(it.pool)} of {_said(it.n_ctx)} tokens, policy {_said(it.policy)}")
    row("compression", _compression(it))
    largest = sorted(it.sections.items(), key=lambda item: -item[1])
    row("sections", ", ".join(f"{name} {size_text(size)}" for name, size in largest))


def _compression(it: Description) -> str:
    if not it.compressed:
        return "none"
    whole = "" if it.raw_bytes is None else f", {size_text(it.raw_bytes)} in memory"
    return f"Zstandard, {it.compressed} of {it.pages} pages{whole}"


def _said(value: object) -> str:
    return "?" if value is None else str(value)
