"""`kvflash-convert migrate IN OUT`: a file with the older names of DFlash."""

from __future__ import annotations

from pathlib import Path

import click

from ..convert import migrate as old
from .convert_options import FILE, HELP, quiet_option, rope_option, target_option, working
from .terminal import note, size_text


@click.command(context_settings=HELP)
@click.argument("source", type=FILE, metavar="IN")
@click.argument("out", type=FILE, metavar="OUT")
@target_option("The model that it drafts for: the result is compared with it, and gets its tokenizer if it has none.")
@rope_option
@quiet_option
def migrate(*, source: Path, out: Path, target: Path | None, rope_differs: bool, quiet: bool) -> None:
    """Give a drafter's file llama.cpp's names.

    For files whose architecture is dflash-draft, qwen35-dflash-draft or gemma4-dflash-draft. Values are
    copied as they are. A file without its target layers, as quantisers of that kind leave it, is refused.
    """
    with working(f"writing {out}", quiet=quiet) as progress:
        old.migrate(source, out, model=target, rope_differs=rope_differs, progress=progress)
    if not quiet:
        note(f"written to {out}, {size_text(out.stat().st_size)}")
