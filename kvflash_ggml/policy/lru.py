"""Recency: the chunks that were written or recalled last stay. Recalls nothing by itself; the baseline."""

from __future__ import annotations

NAME = "lru"
