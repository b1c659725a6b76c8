"""`kvflash-convert model HF_DIR`: a whole model, by llama.cpp's own converter."""

from __future__ import annotations

from pathlib import Path

import click

from ..convert import upstream
from .convert_options import FILE, FOLDER, quiet_option
from .model import plain_errors
from .terminal import note, size_text


@click.command(context_settings={"help_option_names": ["-h", "--help"], "ignore_unknown_options": True})
@click.argument("folder", type=FOLDER, metavar="DIR")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS]...")
@click.option("-o", "--out", type=FILE, metavar="FILE", help="The file to write.  [default: DIR-TYPE.gguf]")
@click.option(
    "--type",
    "kind",
    type=click.Choice(upstream.TYPES),
    default="auto",
    help="Of most tensors; auto is the 16-bit type that loses least.  [default: auto]",
)
@quiet_option
def model(*, folder: Path, arguments: tuple[str, ...], out: Path | None, kind: str, quiet: bool) -> None:
    """Make a GGUF file of the Hugging Face model in DIR.

    llama.cpp's own converter does it, of the release that this package is built from, in a process of its
    own. It needs torch and transformers, the extra "convert" of this package. ARGUMENTS are passed on to it,
    as in kvflash-convert model DIR -- --no-mtp. It may run code that lies in DIR: convert what you trust.
    """
    made = out or Path(f"{folder.resolve().name}-{kind}.gguf")
    with plain_errors(verbose=False):
        upstream.convert_model(folder, made, kind=kind, arguments=arguments, shown=not quiet)
    if not quiet:
        note(f"written to {made}, {size_text(made.stat().st_size)}")
