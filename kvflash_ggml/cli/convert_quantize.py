"""`kvflash-convert quantize IN OUT`: a drafter's file in smaller types, and what that costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

import click

from ..convert import acceptance, kquants, types
from ..convert import quantize as smaller
from ..errors import ConversionError
from .child import run_child
from .convert_options import FILE, HELP, quiet_option, target_option, working
from .model import plain_errors
from .terminal import busy, note, size_text, stderr_is_terminal

_SECONDS = 3600
_TOLERATED = 0.05


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
@target_option(
    "Measure with this model how many drafted tokens it accepts, of IN and of OUT. Needs the native library."
)
@click.option(
    "--text",
    "texts",
    type=click.File(encoding="utf-8"),
    multiple=True,
    metavar="FILE",
    help="What the target goes on with for that; may be given several times.  [default: four short beginnings]",
)
@click.option(
    "-n",
    "--tokens",
    type=click.IntRange(min=1, max=4096),
    default=acceptance.TOKENS,
    help=f"How far it goes on with each.  [default: {acceptance.TOKENS}]",
)
@quiet_option
def quantize(
    *, source: Path, out: Path, kind: str, target: Path | None, texts: tuple[TextIO, ...], tokens: int, quiet: bool
) -> None:
    """Make a drafter's file smaller.

    fc, embeddings, heads and codebooks keep eight bits or more, norms stay as they are, and so does
    every key. Types with a k are made by the native library, others without it.

    A drafter can lose more than its target by this, so give a --target and look.
    """
    encode = kquants.encode if smaller.needs_library(kind) else types.encode
    with working(f"writing {out}", quiet=quiet) as progress:
        smaller.quantize(source, out, kind=kind, encode=encode, progress=progress)
    if not quiet:
        note(f"written to {out}, {size_text(out.stat().st_size)} of {size_text(source.stat().st_size)}")
    if target is not None:
        asked = {"target": str(target), "drafts": [str(source), str(out)], "tokens": tokens}
        asked["texts"] = [file.read() for file in texts] or acceptance.TEXTS
        with plain_errors(verbose=False), busy("drafting", shown=stderr_is_terminal() and not quiet):
            before, after = _measured(asked)
        _tell(before, after)


def _measured(asked: dict[str, Any]) -> list[dict[str, Any]]:
    child = run_child(json.dumps(asked), timeout=_SECONDS, module="kvflash_ggml.convert.acceptance")
    if child.failure:
        raise ConversionError(
            Path(asked["target"]).name, "acceptance", found=child.failure, wanted="a measurement",
            remedy="The file is written; kvflash-convert verify checks it beside its target.",
        )  # fmt: skip
    found: list[dict[str, Any]] = child.said["drafts"]
    return found


def _tell(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Tokens won a step: those accepted, and the target's own."""
    rows = {"before": before, "after": after}
    for name, it in rows.items():
        click.echo(f"{name:7}{it['accepted']:6.2f} of {it['block']} drafted tokens accepted, in {it['steps']} steps")
    won = (1 + after["accepted"]) / (1 + before["accepted"]) - 1
    click.echo(f"tokens a step: {won:+.1%}")
    if won < -_TOLERATED:
        click.secho(f"warning: more than {_TOLERATED:.0%} is lost: a larger --type keeps more", err=True, fg="yellow")
