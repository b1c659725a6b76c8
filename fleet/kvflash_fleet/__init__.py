"""Conversations that servers of one model share: `kvflash-run serve --store`, and the verb `kvflash-run store`.

`objects.py` keeps named bytes, in a folder or an object store. `shared.py` has the states of texts among them, and
`takeover.py` is the server's store of swapped-out conversations. `tidy.py` and `verb.py` look after it all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvflash_ggml.store.swapped import SharedStore

from .objects import open_objects
from .shared import SharedTexts
from .takeover import SharedSwapStore


def open_store(url: str, *, made: str, bandwidth: int) -> Callable[..., SharedStore]:
    """Open the texts of one model at a URL or below a folder. Return what makes the store of a server's scheduler.

    made: the devices of this server. bandwidth: bytes per second at most, 0 for no limit. ConfigError for a place that
    cannot be written.
    """
    return partial(SharedSwapStore, SharedTexts(open_objects(url, write=True), made=made, bandwidth=bandwidth))
