"""`kvflash-convert inspect FILE...`: what is in a GGUF file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ..convert.describe import Description, describe
from ..errors import KVFlashError, brief
from .convert_options import HELP
from .terminal import size_text

_WIDTH = 13


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
    documents: list[dict[str, Any]] = []
    failed = False
    for path in files:
        try:
            found = describe(path)
        except (KVFlashError, OSError) as error:
            failed = True
            click.secho(f"Error: {error}", err=True, fg="red")
            documents.append({"path": str(path), "error": str(error)})
            continue
        documents.append(asdict(found))
        if not as_json:
            _print(found)
    if as_json:
        click.echo(json.dumps(documents, indent=2))
    ctx.exit(1 if failed else 0)


def _print(it: Description) -> None:
    click.echo(click.format_filename(it.path))
    kinds = ", ".join(f"{count} {kind}" for kind, count in it.types.items())
    _row("model", f"{brief(it.architecture)}, {brief(it.name or 'without a name')}")
    _row("file", f"{size_text(it.bytes)}, {it.parameters / 1e6:,.1f} M parameters in tensors of {kinds}")
    _row("trained for", "a length that it does not say" if it.context is None else f"{it.context:,} tokens")
    _row("vocabulary", "none" if it.vocab is None else f"{it.vocab:,} tokens")
    _row("layers", _layers(it))
    if it.token_bytes is not None:
        _row("cache", f"{it.token_bytes:,} bytes a token as f16, in the layers that a pool pages")
    if it.drafter is None:
        _row("heads", _heads(it))
    else:
        _row("drafter", ", ".join(f"{key} {brief(value)}" for key, value in it.drafter.items()))
    _row("template", "a chat template" if it.template else "no chat template")


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


def _row(name: str, text: str) -> None:
    click.echo(f"  {name:{_WIDTH}}{text}")
