"""What the verbs of `kvflash-convert` share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from .model import plain_errors
from .terminal import Progress, stderr_is_terminal

HELP = {"help_option_names": ["-h", "--help"]}

FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(path_type=Path)

quiet_option = click.option("-q", "--quiet", is_flag=True, help="Say nothing but errors.")

rope_option = click.option(
    "--rope-differs",
    is_flag=True,
    help="The drafter was trained with another RoPE base than its target's; otherwise that is refused.",
)


def target_option(help_text: str, *, required: bool = False) -> Callable[[Any], Any]:
    """--target: the GGUF file of the model that a drafter is for."""
    return click.option("--target", type=FILE, metavar="GGUF", required=required, help=help_text)


@contextmanager
def working(doing: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress line in MiB on a terminal's stderr while something is done; errors end with their message."""
    progress = Progress(shown=stderr_is_terminal() and not quiet, doing=doing, unit="MiB", speed="MiB/s")
    with plain_errors(verbose=False):
        try:
            yield lambda done, total: progress.update(done >> 20, total >> 20)
        finally:
            progress.erase()
