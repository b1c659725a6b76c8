"""Objects of a shared store, in memory."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvflash_fleet.objects import Listed


class MemoryObjects:
    """before: called with what is about to happen, and may raise or do something else first. clock: when it is."""

    def __init__(
        self, before: Callable[[str, str], None] = lambda what, name: None, clock: Callable[[], float] = time.time
    ) -> None:
        self.all: dict[str, tuple[bytes, float]] = {}
        self.before = before
        self.clock = clock

    def get(self, name: str) -> bytes:
        self.before("get", name)
        if name not in self.all:
            raise FileNotFoundError(name)
        return self.all[name][0]

    def put(self, name: str, data: bytes) -> None:
        self.before("put", name)
        self.all[name] = data, self.clock()

    def create(self, name: str, data: bytes) -> bool:
        self.before("create", name)
        return self.create_now(name, data)

    def create_now(self, name: str, data: bytes) -> bool:
        free = name not in self.all
        if free:
            self.all[name] = data, self.clock()
        return free

    def list(self, prefix: str) -> list[Listed]:
        self.before("list", prefix)
        return [Listed(name, len(data), at) for name, (data, at) in sorted(self.all.items()) if name.startswith(prefix)]

    def delete(self, name: str) -> None:
        self.before("delete", name)
        self.all.pop(name, None)
