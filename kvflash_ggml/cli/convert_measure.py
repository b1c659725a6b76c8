"""How many drafted tokens a target accepts: asked in a child process, and printed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import click

from ..errors import ConversionError
from ..native import library
from ..settings import setting
from ..spec import acceptance
from .child import run_child
from .model import plain_errors
from .sections import collected
from .terminal import busy, stderr_is_terminal

_SECONDS = 3600
_TOLERATED = 0.05


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """What the target goes on with, and how far."""

    texts: tuple[TextIO, ...] = setting(
        click.File(encoding="utf-8"), "--text", default=(), many=True, metavar="FILE", variable="",
        help="What the target goes on with to measure; may be given several times.  [default: four short beginnings]",
    )  # fmt: skip
    tokens: int = setting(
        int, "-n", least=1, most=4096, default=acceptance.TOKENS, variable="", help="How far it goes on with each."
    )


measure_options = collected("measuring", MeasureOptions)


def check_library() -> None:
    """LibraryError where nothing can be measured, before anything is written."""
    library.library_folder()


def measure(drafts: dict[str, Path], *, target: Path, measuring: MeasureOptions, quiet: bool) -> None:
    """Measure drafts of one drafter, by what they are called, and print a line for each; two are compared.

    Raises click.ClickException if the child fails, or the target accepts nothing of the first one.
    """
    request = {
        "target": str(target),
        "drafts": [str(path) for path in drafts.values()],
        "texts": [file.read() for file in measuring.texts] or acceptance.TEXTS,
        "tokens": measuring.tokens,
    }
    with plain_errors(verbose=False), busy("drafting", shown=stderr_is_terminal() and not quiet):
        found = _ask(request)
    for name, it in zip(drafts, found, strict=True):
        click.echo(f"{name:7}{it['accepted']:6.2f} of {it['block']} drafted tokens accepted, in {it['steps']} steps")
    _refuse_nothing(found[0], target, next(iter(drafts.values())))
    if len(found) == 2:
        _compare(*found)


def _ask(request: dict[str, Any]) -> list[dict[str, Any]]:
    child = run_child(json.dumps(request), timeout=_SECONDS, module="kvflash_ggml.spec.acceptance")
    if child.failure:
        raise ConversionError(
            Path(request["target"]).name, "acceptance", found=child.failure, wanted="a measurement",
            remedy="Whether the files are sound says kvflash-convert verify.",
        )  # fmt: skip
    found: list[dict[str, Any]] = child.said["drafts"]
    return found


def _refuse_nothing(it: dict[str, Any], target: Path, draft: Path) -> None:
    """Raise click.ClickException where the figure that was printed is 0.00."""
    if round(it["accepted"], 2) > 0:
        return
    if not it["steps"]:
        raise click.ClickException(
            f"{draft.name} was not measured: every text ended within its first draft. Go on for more tokens: --tokens."
        )
    raise click.ClickException(
        f"{target.name} accepts 0.00 drafted tokens a step, measured in {it['steps']} steps: {draft.name} was trained "
        f"for another model, or the texts are of a kind that it does not know. Give its own target, or --text FILE."
    )


def _compare(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Tokens won a step: those accepted, and the target's own."""
    won = (1 + after["accepted"]) / (1 + before["accepted"]) - 1
    click.echo(f"tokens a step: {won:+.1%}")
    if won < -_TOLERATED:
        click.secho(f"warning: more than {_TOLERATED:.0%} is lost: a larger --type keeps more", err=True, fg="yellow")
