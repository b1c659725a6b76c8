"""The command line: `kvflash-run`, one file per verb."""

from .main import main

__all__ = ["main"]
