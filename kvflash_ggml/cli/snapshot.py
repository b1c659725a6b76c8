"""`kvflash-run snapshot`: files of saved sessions. Needs no model and no native library."""

from __future__ import annotations

import click

from .snapshot_info import info
from .snapshot_prune import prune
from .snapshot_verify import verify


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def snapshot() -> None:
    """Look at, check and tidy up the files that --snapshot writes."""


for command in (info, verify, prune):
    snapshot.add_command(command)
