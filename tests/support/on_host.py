"""Which chunks of a text the host has, without images."""

from __future__ import annotations

from kvflash_ggml.pool.page_table import PageTable


class OnHost(set[int]):
    """In place of a `HostStore`, for page tables alone."""

    def drop(self, chunk: int) -> None:
        self.discard(chunk)


def save(table: PageTable) -> None:
    """All that is sealed is on the host now."""
    assert isinstance(table.images, OnHost)
    table.images.update(table.unsaved)
