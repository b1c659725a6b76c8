"""`kvflash-convert inspect FILE...`: what is in a GGUF file."""

from __future__ import annotations

from pathlib import Path

import click

from ..convert.describe import Description, describe
from ..errors import brief
from .convert_options import HELP
from .facts import row, tell
from .terminal import size_text


@click.command(context_settings=HELP)
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout: a list, an object per file.")
@click.pass_context
def inspect(ctx: click.Context, *, files: tuple[Path, ...], as_json: bool) -> None:
    """Say what a GGUF file is, from its head alone.

    Architecture, trained length, layers whose cache a pool pages, bytes of cache a token, retrieval heads
    if a calibration has found them, what a drafter says of its target, and whether there is a chat
    template. The exit code is 1 if a file is none or is damaged.
    """
    ctx.exit(0 if tell(files, describe, _rows, as_json=as_json) else 1)


def _rows(it: Description) -> None:
    kinds = ", ".join(f"{count} {kind}" for kind, count in it.types.items())
    row("model", f"{brief(it.architecture)}, {brief(it.name or 'without a name')}")
    row("file", f"{size_text(it.bytes)}, {it.parameters / 1e6:,.1f} M parameters in tensors of {kinds}")
    row("trained for", "a length that it does not say" if it.context is None else f"{it.context:,} tokens")
    row("vocabulary", "none" if it.vocab is None else f"{it.vocab:,} tokens")
    row("layers", _layers(it))
    if it.token_bytes is not None:
        row("cache", f"{it.token_bytes:,} bytes a token as f16, in the layers that a pool pages")
    if it.drafter is None:
        row("heads", _heads(it))
    else:
        row("drafter", ", ".join(f"{key} {brief(value)}" for key, value in it.drafter.items()))
    row("template", "a chat template" if it.template else "no chat template")


def _layers(it: Description) -> str:
    text = "?" if it.layers is None else f"{it.layers}"
    text += f", {it.attention} with attention"
    if it.pooled is None:
        text += f"; the file names a window of {it.window:,} tokens, and not the layers that have it"
    else:
        text += f", {it.pooled} of them grow with the text"
    return text + (f"; {it.nextn} more that predict further tokens" if it.nextn else "")


def _heads(it: Description) -> str:
    if it.heads is None:
        return "not calibrated yet: kvflash-run calibrate"
    if not it.heads:
        return "no head finds what a question asks for: all are asked"
    return ", ".join(f"{layer}.{head}" for layer, head in it.heads)
