"""`kvflash-run calibrate MODEL`: which heads of a model find what a question asks for."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .. import env
from ..calibration import known
from ..calibration.known import Calibration, heads_file
from ..errors import ConfigError
from ..files import check_writable
from .model import load_model, log_to_stderr, plain_errors
from .options import DeviceOptions, LogOptions, WeightOptions, device_options, log_options, weight_options
from .report import say
from .sections import HELP, MODEL_FILE, SectionCommand, option
from .terminal import Progress, note, stderr_is_terminal

if TYPE_CHECKING:
    from ..llama.llama import Llama

_result = option("Result")

_FINDING = "finding the heads of this model that retrieve, once"

PATIENCE = 60.0
"""Seconds that a command may wait at its end for a calibration that nobody asked for."""


@click.command(
    cls=SectionCommand,
    context_settings=HELP | {"auto_envvar_prefix": "KVFLASH"},
)
@click.argument("model", type=MODEL_FILE, metavar="MODEL")
@_result(
    "-o",
    "--save",
    type=click.Path(dir_okay=False, path_type=Path),
    allow_from_autoenv=False,
    metavar="FILE",
    help="Where to write the heads, for --kvflash-calibrate FILE.  [default: the user's cache folder, where every"
    " later run finds them]",
)
@_result("--json", "as_json", is_flag=True, help="One JSON document on stdout: every head and its shares.")
@weight_options
@device_options
@log_options
def calibrate(
    *, model: str, save: Path | None, as_json: bool, loading: WeightOptions, devices: DeviceOptions, log: LogOptions
) -> None:
    """Find the retrieval heads of a model.

    \b
    It reads two short documents and asks about every fact in them. The heads that attend
    to what is asked for, and not to the rest, are the ones that the policy 'qk' asks.
    A run with a pool does so by itself behind its first answer, if that takes less than
    a minute; this shows the table, and waits as long as it takes.
    """
    log_to_stderr(log)
    with plain_errors(verbose=log.verbose):
        _check_place(save)
        found = _find(model, loading, devices, log)
        path = save or heads_file(found.model)
        known.save(found, path)
    say(table(found), asdict(found), as_json=as_json)
    if not (as_json or log.quiet):
        note(f"written to {path}")


def table(found: Calibration) -> list[str]:
    """List the best heads, for people."""
    lines = ["  layer  head   asked for   not asked for   first"]
    for head in found.heads[:16]:
        mark = "*" if head.chosen else " "
        lines.append(
            f"{mark} {head.layer:5d} {head.head:5d}   {head.found:9.1%}   {head.control:13.1%}   {head.first:5.0%}"
        )
    chosen = len(found.chosen)
    lines.append("")
    if chosen:
        asked = "1 head (*) is asked" if chosen == 1 else f"{chosen} heads (*) are asked"
        lines.append(f"{asked}. Shares of attention on the fact asked for, and on the others")
        if found.agreed is not None:
            lines.append(f"{found.agreed} of these {chosen} would be chosen by each of the documents alone, too")
    else:
        lines.append("no head of this model finds what a question asks for: all are asked")
    return lines


def _check_place(save: Path | None) -> None:
    """Raise ConfigError if the result cannot be written; finding it takes minutes. Makes its folder."""
    folder = env.heads_dir() if save is None else save.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}: name a file with --save") from error
    check_writable(folder / "heads.json" if save is None else save)


def _find(model: str, loading: WeightOptions, devices: DeviceOptions, log: LogOptions) -> Calibration:
    from ..calibration.known import of_llama
    from ..calibration.run import calibrate as find
    from ..runtime.model import weights_of

    shown = stderr_is_terminal() and not log.quiet
    with (
        Progress(shown=shown, doing="asking the model") as progress,
        load_model(model, loading=loading, devices=devices, verbose=log.verbose) as llm,
    ):
        return find(weights_of(llm), model_id=of_llama(llm), settings=llm.context_params, progress=progress.update)


def finish(llm: Llama, *, shown: bool) -> None:
    """Wait for the calibration behind an answer. Ctrl-C leaves it, and the answer stays."""
    if llm.kvflash is None:
        return
    with suppress(KeyboardInterrupt), Progress(shown=shown, doing=_FINDING) as progress:
        llm.kvflash.calibrated(progress.update, most=PATIENCE)
