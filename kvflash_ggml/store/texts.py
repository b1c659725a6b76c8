"""The index of texts: found by their beginning, least recently used first, and how many bytes they have in memory."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from ..arrays import Int32s, common_prefix
from ..constants import CHUNK


class HasTokens(Protocol):
    """An object with tokens that do not change while it is kept."""

    @property
    def tokens(self) -> Int32s: ...


T = TypeVar("T", bound=HasTokens)


class Texts(Generic[T]):
    """The index of a store. It evicts nothing by itself.

    size: bytes in memory. A part that several texts have counts once, and the tokens of every text count.
    """

    def __init__(self) -> None:
        self._all: dict[T, tuple[str, bytes]] = {}  # the salt and the beginning of each
        self._begins: dict[tuple[str, bytes], list[T]] = {}
        self._lengths: Counter[int] = Counter()  # bytes of these beginnings
        self._parts: dict[T, list[tuple[int, int]]] = {}
        self._holders: Counter[int] = Counter()
        self.size = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._all))

    def __contains__(self, text: T) -> bool:
        return text in self._all

    def add(self, text: T, *, salt: str = "", least: int = CHUNK) -> None:
        """Add a text as the most recently used one. salt: texts of different salts are never compared.

        least: so many of its first tokens, a chunk at most, make another text like it; all of a shorter one do.
        """
        begin = self._all[text] = salt, _bytes(text.tokens[: min(least, CHUNK)])
        self._begins.setdefault(begin, []).append(text)
        self._lengths[len(begin[1])] += 1
        self.size += text.tokens.nbytes

    def remove(self, text: T, /) -> None:
        """Remove a text and its parts."""
        self.drop_parts(text)
        begin = self._all.pop(text)
        self._begins[begin].remove(text)
        self._lengths -= Counter((len(begin[1]),))
        if not self._begins[begin]:
            del self._begins[begin]
        self.size -= text.tokens.nbytes

    def touch(self, text: T) -> None:
        """Make a text the most recently used one."""
        self._all[text] = self._all.pop(text)

    def alike(self, tokens: Int32s, *, salt: str = "") -> list[T]:
        """Return the texts that share their `least` tokens with these tokens."""
        begin = _bytes(tokens[:CHUNK])
        lengths = [length for length in self._lengths if length <= len(begin)]
        return [text for length in lengths for text in self._begins.get((salt, begin[:length]), ())]

    def nearest(self, tokens: Int32s, *, salt: str = "") -> tuple[int, int]:
        """Return how many of these tokens the text begins with that has most of them, and the length of that text."""
        alike = self.alike(tokens, salt=salt)
        return max(((common_prefix(one.tokens, tokens), len(one.tokens)) for one in alike), default=(0, 0))

    # --- bytes

    def add_parts(self, text: T, parts: Iterable[tuple[int, int]]) -> None:
        """Count what a text has in memory beside its tokens: (identity, bytes) of each part."""
        self._parts[text] = list(parts)
        for key, size in self._parts[text]:
            self._holders[key] += 1
            if self._holders[key] == 1:
                self.size += size

    def drop_parts(self, text: T) -> None:
        """Count the parts of a text no more: those that were added, though the text may have others by now."""
        for key, size in self._parts.pop(text, ()):
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self.size -= size

    def holds(self, key: int) -> bool:
        """Return whether a text has the part of this identity."""
        return key in self._holders


def _bytes(tokens: Int32s) -> bytes:
    return tokens.astype("<i4").tobytes()


def usable(text: Int32s, places: Sequence[int] | None, tokens: Int32s) -> int:
    """Return how many tokens of a prompt need not be read if it continues a text. At least one is read.

    places: where the text can be continued before its end; None for anywhere.
    """
    shared = min(common_prefix(text, tokens), len(tokens) - 1)
    if places is None or shared == len(text):
        return shared
    return max((place for place in places if place <= shared), default=0)


def new_id() -> str:
    """Return an identity that no other conversation has."""
    return f"c-{secrets.token_hex(8)}"
