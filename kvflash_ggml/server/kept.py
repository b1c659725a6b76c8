"""Keeps responses in memory, for requests of `/v1/responses` that go on from one."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass

from ..batching.messages import Access

MAX_ITEMS_BYTES = 64 << 20
"""Bytes of all items that are kept. The key with the most loses its least recently used response first."""

_BESIDE = 1 << 10
"""About how many bytes a kept response has beside its items."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A response that later requests can continue.

    items: of the request and of the response: JSON lists as text, which kept responses share. Objects would take twenty
    times as much. conversation: the text that has them; salt: its owner; key: of the request. response: all of it but
    its output, as JSON.
    """

    items: tuple[bytes, ...]
    conversation: str
    salt: str
    key: str = ""
    response: bytes = b"{}"

    @property
    def size(self) -> int:
        return _BESIDE + len(self.response) + sum(map(len, self.items))

    def json(self) -> bytes:
        """Return all items as one JSON list."""
        return b"[%s]" % b",".join(text[1:-1] for text in self.items if len(text) > 2)


class KeptItems:
    """Keeps responses for requests with a `previous_response_id`. Used from any thread."""

    def __init__(self, capacity: int = MAX_ITEMS_BYTES) -> None:
        self._capacity = capacity
        self._kept: dict[str, OrderedDict[str, Kept]] = {}  # by key
        self._bytes: Counter[str] = Counter()
        self._lock = threading.Lock()

    def keep(self, id: str, kept: Kept) -> None:
        """Keep the items of a request and of its response. The largest key loses its oldest, if there is no room."""
        with self._lock:
            self._kept.setdefault(kept.key, OrderedDict())[id] = kept
            self._bytes[kept.key] += kept.size
            while self._bytes.total() > self._capacity:
                ((key, _),) = self._bytes.most_common(1)
                self._bytes[key] -= self._kept[key].popitem(last=False)[1].size

    def find(self, id: str, access: Access) -> Kept | None:
        """Return a kept response; None if it is not known, or not for this access."""
        with self._lock:
            for responses in self._kept.values():
                if id in responses and access.may(responses[id].salt):
                    responses.move_to_end(id)
                    return responses[id]
        return None

    def drop(self, id: str) -> None:
        """Drop one response. Later ones that go on from it have its items."""
        with self._lock:
            for key, responses in self._kept.items():
                if (kept := responses.pop(id, None)) is not None:
                    self._bytes[key] -= kept.size

    def forget(self, conversation: str) -> None:
        """Drop the responses of a conversation that was erased."""
        with self._lock:
            for key, responses in self._kept.items():
                for id in [id for id, kept in responses.items() if kept.conversation == conversation]:
                    self._bytes[key] -= responses.pop(id).size
