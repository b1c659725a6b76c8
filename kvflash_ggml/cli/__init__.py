"""The command line: `kvflash-run`, one file per verb."""

try:
    from .main import main
except KeyboardInterrupt:
    raise SystemExit(130) from None  # as `main` ends

__all__ = ["main"]
