"""Items of responses that requests can go on from by their name."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from ..batching.messages import Access

MAX_BYTES = 64 << 20
"""JSON of all items that are kept; the responses that were used longest ago go first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """items: of the request and of the response. conversation: the text that has them; salt: whose it is."""

    items: list[dict[str, Any]]
    conversation: str
    salt: str
    bytes: int


class KeptItems:
    """What requests with a `previous_response_id` go on from. From any thread."""

    def __init__(self, capacity: int = MAX_BYTES) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def keep(self, id: str, items: list[dict[str, Any]], *, conversation: str, salt: str) -> None:
        """Keep the items of a request and of its response. Those that were used longest ago go, if there is no room."""
        kept = Kept(items=items, conversation=conversation, salt=salt, bytes=len(json.dumps(items)))
        with self._lock:
            self._kept[id] = kept
            self._bytes += kept.bytes
            while self._bytes > self._capacity:
                self._bytes -= self._kept.popitem(last=False)[1].bytes

    def find(self, id: str, access: Access) -> Kept | None:
        """What is kept of a response; None if it is not known, or not for this access."""
        with self._lock:
            kept = self._kept.get(id)
            if kept is None or not access.may(kept.salt):
                return None
            self._kept.move_to_end(id)
            return kept
