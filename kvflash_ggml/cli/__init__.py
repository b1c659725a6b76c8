"""The command line: `kvflash-run`, one file per verb.

Options are made of settings (`sections.py`): a setting is said once, as the field of a dataclass. `main.py` imports a
verb when it is called, so that `--help` and `--version` load neither numpy nor the library. stdout carries the answer
alone; notes, progress and errors go to stderr (`terminal.py`).

The room parses, starts and reports. What a program could want too belongs to a room below.
"""

try:
    from .main import main
except KeyboardInterrupt:
    raise SystemExit(130) from None  # as `main` ends

__all__ = ["main"]
