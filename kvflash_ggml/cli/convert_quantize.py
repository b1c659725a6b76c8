"""`kvflash-convert quantize IN OUT`: a drafter's file in smaller types, and what that costs."""

from __future__ import annotations

from pathlib import Path

import click

from ..convert import kquants, writer
from ..convert import quantize as smaller
from ..gguf import types
from .convert_measure import MeasureOptions, check_library, measure, measure_options
from .convert_options import FILE, HELP, quiet_option, target_option, working
from .terminal import note, size_text


@click.command(context_settings=HELP)
@click.argument("source", type=FILE, metavar="IN")
@click.argument("out", type=FILE, metavar="OUT")
@click.option(
    "--type",
    "kind",
    type=click.Choice(smaller.TYPES, case_sensitive=False),
    default="q8_0",
    help="Of the layers' matrices.  [default: q8_0]",
)
@target_option("Measure with this model how many drafted tokens it accepts, of IN and OUT. Needs the native library.")
@measure_options
@quiet_option
def quantize(
    *, source: Path, out: Path, kind: str, target: Path | None, measuring: MeasureOptions, quiet: bool
) -> None:
    """Make a drafter's file smaller.

    fc, embeddings, heads and codebooks keep eight bits or more, norms stay as they are, and so does
    every key. Types with a k are made by the native library, others without it.

    A drafter can lose more than its target by this, so give a --target and look.
    """
    encode = kquants.encode if smaller.needs_library(kind) else types.encode
    with working(f"writing {out}", quiet=quiet) as progress:
        writer.check_output(out, target)
        if target is not None:
            check_library()
        smaller.quantize(source, out, kind=kind, encode=encode, progress=progress)
    if not quiet:
        note(f"written to {out}, {size_text(out.stat().st_size)} of {size_text(source.stat().st_size)}")
    if target is not None:
        measure({"before": source, "after": out}, target=target, measuring=measuring, quiet=quiet)
