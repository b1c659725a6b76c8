"""Policies to compare with. Importing the package registers them all."""

from __future__ import annotations

from . import oracle, statistics

__all__ = ["oracle", "statistics"]
