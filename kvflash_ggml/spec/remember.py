"""What drafters know of a text, asked of each and given back to each. The text goes on, whatever they make of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from ..arrays import Int32s
from ..errors import SnapshotError
from ..state.draft import SavedDraft
from .base import Drafter, Remembering

logger = logging.getLogger("kvflash_ggml")


def state(drafters: Iterable[Drafter]) -> list[SavedDraft]:
    """What they know, of those that can say it."""
    saved = []
    for drafter in drafters:
        if isinstance(drafter, Remembering):
            try:
                one = drafter.state()
            except Exception as err:
                logger.warning("what %s knows of the text is not saved: %s", drafter.name, err)
            else:
                saved += [one] if one is not None else []
    return saved


def load(drafter: Drafter, saved: Sequence[SavedDraft], tokens: Int32s) -> int:
    """Give back to a drafter what one like it knew of this text. How many of its tokens it knows then.

    That is none if the text was saved without drafters. What came back is tried once: a file may hold anything.
    """
    if not saved or not isinstance(drafter, Remembering):
        return 0
    try:
        own = [one for one in saved if one.origin.name == drafter.name]
        if not own:
            raise SnapshotError("it did not draft when the text was saved")
        drafter.load(own[0])
        drafter.propose(int(tokens[-1]), 1)
        return own[0].length
    except Exception as err:
        logger.warning("%s begins anew behind the text that was restored: %s", drafter.name, err)
    drafter.truncate(0)
    return 0
