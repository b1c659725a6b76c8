"""Verifies every draft, up to a fixed width: what is computed depends on the text alone."""

from __future__ import annotations

from .draft import Draft


class Fixed:
    """A `loop.Judge` without a clock. width: rows of a step, the newest token's among them."""

    def __init__(self, width: int) -> None:
        self._width = width

    def begin(self) -> None:
        """See `Judge`."""

    def asks(self, source: str) -> bool:
        """See `Judge`."""
        return True

    def rows(self, draft: Draft, most: int) -> int:
        """See `Judge`."""
        return min(len(draft) + 1, most, self._width)

    def nothing(self, source: str, seconds: float) -> None:
        """See `Judge`."""

    def plain(self, seconds: float) -> None:
        """See `Judge`."""

    def verified(self, draft: Draft, accepted: int, seconds: float, draft_seconds: float) -> None:
        """See `Judge`."""
