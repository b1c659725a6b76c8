"""The options that keep a session in a file, all named `--snapshot...`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from .sections import collected, option

_snapshot = option("Snapshot")


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotOptions:
    """Where a session comes from and goes to."""

    snapshot: Path | None
    snapshot_ro: bool
    snapshot_compress: bool


snapshot_options = collected(
    "saving",
    SnapshotOptions,
    _snapshot(
        "--snapshot",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Go on from the session in FILE, if it is there, and save the session to FILE at the end.",
    ),
    _snapshot("--snapshot-ro", is_flag=True, help="Only read FILE, which must be there."),
    _snapshot(
        "--snapshot-compress",
        is_flag=True,
        help="Save with Zstandard; needs the package zstandard.",
    ),
)
