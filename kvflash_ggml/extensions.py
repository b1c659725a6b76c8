"""Parts that are distributions of their own. What they give is found by entry points."""

from __future__ import annotations

from typing import Any

from .errors import ConfigError

GROUP = "kvflash_ggml.extensions"
"""The group of entry points."""


def extension(name: str, *, asked: str, folder: str) -> Any:
    """Import what another distribution gives under a name.

    asked: what the user wants of it. folder: of the distribution, in the checkout. ConfigError where it is missing.
    """
    from importlib.metadata import entry_points  # here, since it brings the email package

    for point in entry_points(group=GROUP, name=name):
        return point.load()
    raise ConfigError(f"{asked} needs kvflash-{folder}, which is not installed: pip install ./{folder} in the checkout")
