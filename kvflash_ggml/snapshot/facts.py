"""What the directory of a container says, believed only if it can be. SnapshotError if not."""

from __future__ import annotations

from typing import Any

from .container import Container

LARGEST = 2**31 - 1


def count(container: Container, name: str, *, most: int = LARGEST) -> int:
    """A whole number from 0 to `most`."""
    value = container.facts.get(name)
    if type(value) is not int or not 0 <= value <= most:
        raise container.contradiction(name)
    return value


def fact(container: Container, name: str, kind: type) -> Any:
    """A value of this very type."""
    value = container.facts.get(name)
    if type(value) is not kind:
        raise container.contradiction(name)
    return value
