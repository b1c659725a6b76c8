"""What must hold in a page table after every change."""

from __future__ import annotations

from kvflash_ggml.constants import CHUNK
from kvflash_ggml.pool.page_table import PageTable
from kvflash_ggml.pool.plan import ABSENT


def check_table(table: PageTable) -> None:
    """Raise AssertionError unless blocks and chunks are in one-to-one order and no token is lost."""
    here = tuple(c for c, chunk in enumerate(table.chunks) if chunk.block != ABSENT)
    assert table.resident_chunks == here, "the layout names other chunks as resident"
    taken = [chunk.block for chunk in table.chunks if chunk.block != ABSENT]
    assert len(taken) == len(set(taken)), "two chunks share a block"
    assert set(taken) <= set(table.blocks.order), "there is no such block"
    assert table.held == set(taken), "the table says something else than the allocator is told"
    assert len(table.chunks) == -(-table.length // CHUNK), "a committed chunk has no entry"
    for c, chunk in enumerate(table.chunks):
        assert chunk.block != ABSENT or c in table.images, f"chunk {c} is neither resident nor on the host"
