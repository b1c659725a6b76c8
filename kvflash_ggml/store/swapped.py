"""Swapped-out conversations: in memory or in a folder, evicted least recently used first."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISREG
from typing import Any, Protocol

from ..arrays import Int32s
from ..constants import CHUNK
from ..errors import ConfigError, KVFlashError
from .folder import Folder, disk_is_full, file_stat
from .texts import Texts, new_id, usable

SUFFIX = ".kvs"

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
"""Names that users may give to files: no paths, and no hidden files."""

_SWAPPED = re.compile(r"(?P<id>c-[0-9a-f]{16})~(?P<salt>[0-9a-f]*)~(?P<prompt>[0-9]{1,12})\.kvs")


@dataclass(slots=True, kw_only=True, eq=False)
class Stored:
    """A conversation's file. current: whether it has the whole text. places: see `usable`."""

    path: Path
    places: Sequence[int] | None = None
    current: bool = True


class ConversationFolder:
    """A folder for conversations: `parked/` has those that the server swaps out, beside files that users name.

    ConfigError if it cannot be made or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.swapped = Folder(self.path / "parked", _SWAPPED, what="conversations")
        probe = self.swapped.path / ".writable"
        try:
            probe.touch()
            probe.unlink(missing_ok=True)  # another server may begin here
        except OSError as err:
            raise self.swapped.error(err) from err

    def named(self, name: str, salt: str) -> Path:
        """Return the file of a user's name for a text of this salt. ConfigError for a name that is not allowed."""
        return self.path / f"{self._stem(name)}{f'~{salt}' if salt else ''}{SUFFIX}"

    def find(self, name: str, may: Callable[[str], bool]) -> tuple[Path, str] | None:
        """Return the newest file of this name whose salt passes `may`, and that salt. ConfigError as in `named`."""
        stem = self._stem(name)
        paths = [self.path / f"{stem}{SUFFIX}", *self.path.glob(f"{stem}~*{SUFFIX}")]
        salts = {path: path.stem[len(stem) + 1 :] for path in paths}
        own = [path for path, salt in salts.items() if may(salt)]
        files = [(stat.st_mtime_ns, path) for path in own if (stat := file_stat(path)) and S_ISREG(stat.st_mode)]
        newest = max(files, default=None)
        return None if newest is None else (newest[1], salts[newest[1]])

    @staticmethod
    def _stem(name: str) -> str:
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"{name[:80]!r} cannot name a file: use 1 to 128 of A-Z, a-z, 0-9, '.', '_' and '-', not beginning "
                f"with a dot"
            )
        return name.removesuffix(SUFFIX)

    def place(self, conversation: Conversation) -> Path:
        """Return the file for a swapped-out conversation."""
        return self.swapped.path / f"{conversation.id}~{conversation.salt}~{conversation.prompt}{SUFFIX}"

    def stored(self) -> list[tuple[Path, re.Match[str]]]:
        """Return the files of conversations, with the `id`, `salt` and `prompt` of each, the oldest file first."""
        files = self.swapped.files(self.swapped.path)
        stats = [(stat.st_mtime, path, match) for path, match in files if (stat := file_stat(path)) is not None]
        return [(path, match) for _, path, match in sorted(stats, key=lambda one: one[:2])]


MAX_CONVERSATIONS = 4096
"""A request is compared with all that begin as it does."""


class SwappedText(Protocol):
    """A swapped-out text, which goes on bitwise identical. Its last holder releases it."""

    @property
    def tokens(self) -> Int32s: ...

    @property
    def places(self) -> Sequence[int] | None:
        """See `usable`."""
        ...

    def parts(self) -> Iterator[tuple[int, int]]:
        """Yield (identity, bytes) of each part in memory but the tokens. Texts may share parts."""
        ...

    def release(self) -> None: ...


@dataclass(slots=True, kw_only=True, eq=False)
class Conversation:
    """A text that requests continue, in a slot or swapped out.

    name: given by requests, if any. salt: only requests of the same salt may continue it. tokens: when it was swapped
    out. prompt: tokens that the last request gave; a request that leaves the text before that is another conversation.
    swapped: in memory. stored: in the folder. head: what a `SharedStore` knows of its newest state there. stale:
    another server has continued it since.
    """

    id: str = field(default_factory=new_id)
    name: str | None = None
    salt: str = ""
    tokens: Int32s
    prompt: int = 0
    swapped: SwappedText | None = None
    stored: Stored | None = None
    head: Any = None
    used: float = 0.0
    stale: bool = False

    @property
    def where(self) -> str:
        return "memory" if self.swapped is not None else "folder" if self.stored is not None else "device"

    def usable(self, tokens: Int32s) -> int:
        """Return how many tokens of a prompt need not be read if it continues this text."""
        source = self.swapped if self.swapped is not None else self.stored
        return 0 if source is None else usable(self.tokens, source.places, tokens)


@dataclass(slots=True)
class SwapCounts:
    """Conversations that moved from memory to the folder, that were dropped, and that the folder did not take.

    Of a shared store: states that were written and taken over, and conversations that went on as copies.
    """

    stored: int = 0
    dropped: int = 0
    failed: int = 0
    written: int = 0
    taken: int = 0
    copied: int = 0


class SwapStore(Texts[Conversation]):
    """The index of swapped-out conversations, which evicts them. One thread uses it.

    capacity: bytes in memory. folder: takes what memory has no room for; None drops that. read, write: of the model;
    `write` waits until the file is on the disk if `sync` is true.
    """

    def __init__(
        self,
        *,
        capacity: int,
        folder: ConversationFolder | None = None,
        write: Callable[..., None],
        read: Callable[[Path], SwappedText],
    ) -> None:
        super().__init__()
        self._capacity = capacity
        self._folder = folder
        self._write = write
        self._read = read
        self.counts = SwapCounts()
        self._held: Conversation | None = None

    def find(self, tokens: Int32s, *, salt: str, name: str | None) -> tuple[Conversation | None, int]:
        """Return the conversation that saves most tokens of a prompt, and how many; None and 0 without.

        Of equals, one of this name, then the one used last.
        """
        best, highest = None, (0, False, 0.0)
        for found in self.alike(tokens, salt=salt):
            length = found.usable(tokens)
            key = (length, name is not None and found.name == name, found.used)
            if length and key > highest:
                best, highest = found, key
        return best, highest[0]

    def put(self, conversation: Conversation, swapped: SwappedText, now: float) -> None:
        """Add a conversation that was swapped out, and evict others if there is no room. Takes over `swapped`."""
        self._insert(conversation, swapped, now)
        self.make_room()

    def _insert(self, conversation: Conversation, swapped: SwappedText, now: float) -> None:
        conversation.tokens, conversation.swapped, conversation.used = swapped.tokens, swapped, now
        self.add(conversation, salt=conversation.salt, least=conversation.prompt or CHUNK)
        self.add_parts(conversation, swapped.parts())

    @contextmanager
    def holding(self, conversation: Conversation) -> Iterator[None]:
        """Keep a conversation while it is swapped in. Others are evicted afterwards, if room is needed then."""
        self._held = conversation
        try:
            yield
        finally:
            self._held = None
        self.make_room()

    def make_room(self) -> None:
        """Evict until memory and the number of conversations are within their bounds."""
        if self._held is not None:
            return
        while self.size > self._capacity and self.evict():
            pass
        while len(self) > MAX_CONVERSATIONS:
            self.counts.dropped += 1
            self.drop(next(iter(self)))

    def evict(self, *, held: bool = False) -> bool:
        """Evict a conversation from memory, least recently used first; False if there is none.

        held: if need be, one that is being swapped in.
        """
        able = [one for one in self if one.swapped is not None and (held or one is not self._held)]
        if not able:
            return False
        able.sort(key=lambda one: one is self._held)
        first = self._first(able)
        stored = self.store(first, sync=False)  # not synced: a request waits for this memory
        self.counts.stored += stored
        self.counts.dropped += not stored
        if stored and first.stored is not None:
            self._release(first)
        else:
            self.drop(first)
        return True

    def _first(self, able: list[Conversation]) -> Conversation:
        """Return the conversation to evict, of these, least recently used first."""
        return able[0]

    def store(self, conversation: Conversation, *, sync: bool = True) -> bool:
        """Write a conversation to the folder, unless it is there; False if it cannot be written, or without a folder.

        On a full disk, conversations that are only there are deleted, least recently used first, unless all of them
        make no room. sync: wait until it is on the disk.
        """
        if self._folder is None:
            return False
        if conversation.swapped is None or (conversation.stored is not None and conversation.stored.current):
            return conversation.stored is not None
        place = self._folder.place(conversation)
        swapped = self._folder.swapped
        what, full = f"conversations cannot be stored in {swapped.path}", False
        while True:
            try:
                swapped.make(place.parent)  # a cleaner of temporary files may have deleted it
                self._write(conversation.swapped, place, sync=sync)
                break
            except (KVFlashError, OSError) as err:
                swapped.failed(what, err)
                full = True
                if not (disk_is_full(err) and self._forget_file(conversation.swapped)):
                    self.counts.failed += 1
                    return False
        if not full:
            swapped.wrote(what)
        if conversation.stored is not None and conversation.stored.path != place:
            self.delete_file(conversation)
        conversation.stored = Stored(path=place, places=conversation.swapped.places)
        return True

    def _forget_file(self, swapped: SwappedText) -> bool:
        """Delete the least recently used of those that are only in the folder; False if all of them make no room."""
        assert self._folder is not None
        able = [one for one in self if one.swapped is None and one is not self._held]
        needed = swapped.tokens.nbytes + sum(dict(swapped.parts()).values())
        stats = [file_stat(one.stored.path) for one in able if one.stored is not None]
        stored = sum(stat.st_size for stat in stats if stat is not None)
        if not able or needed > self._folder.swapped.free + stored:
            return False
        self.counts.dropped += 1
        self.erase(able[0])
        return True

    def open(self, conversation: Conversation) -> SwappedText:
        """Return the text to swap in. The caller releases it, unless it is `Conversation.swapped`."""
        if conversation.swapped is not None:
            return conversation.swapped
        assert conversation.stored is not None
        return self._read(conversation.stored.path)

    def take(self, conversation: Conversation) -> None:
        """Remove a conversation that is in a slot now. Its file stays until a newer one replaces it."""
        self.remove(conversation)
        if conversation.stored is not None:
            conversation.stored.current = False

    def erase(self, conversation: Conversation) -> None:
        """Forget a conversation, its file too. If that fails, it stays and can be erased again."""
        self.delete_file(conversation)
        self.remove(conversation)

    def drop(self, conversation: Conversation) -> None:
        """Forget a conversation for want of room."""
        self.erase(conversation)

    def lose(self, conversation: Conversation) -> None:
        """Forget a conversation that cannot be swapped in."""
        self.spoil(conversation)
        self.drop(conversation)

    def spoil(self, conversation: Conversation) -> None:
        """Never take this text over from another server again: it could not be used."""

    def delete_file(self, conversation: Conversation) -> None:
        """Delete the file of a conversation, if it has one."""
        stored, conversation.stored = conversation.stored, None
        if stored is not None and self._folder is not None:
            self._folder.swapped.delete(stored.path)

    def _release(self, conversation: Conversation) -> None:
        swapped, conversation.swapped = conversation.swapped, None
        if swapped is not None:
            self.drop_parts(conversation)
            swapped.release()

    def remove(self, conversation: Conversation) -> None:
        """Remove a conversation, and release its memory."""
        self._release(conversation)
        super().remove(conversation)

    def close(self) -> None:
        """Store what the folder lacks, and release everything."""
        for conversation in self:
            self.store(conversation)
            self.remove(conversation)


class SharedStore(SwapStore):
    """A `SwapStore` that shares conversations with other servers of the model. Another distribution has one.

    read_rate: tokens per second of prompts, which its user sets; None before the first.
    """

    read_rate: float | None = None

    def offer(self, conversation: Conversation, swapped: SwappedText) -> None:
        """Write a conversation behind what the server does next. Takes over `swapped`."""
        raise NotImplementedError

    def search(self, tokens: Int32s, *, salt: str, cached: int) -> Callable[[], bool] | None:
        """Look for a conversation elsewhere that saves more than `cached` tokens of a prompt.

        Returns whether to wait, None for no search.
        """
        raise NotImplementedError

    def collect(self) -> bool:
        """Use the results of writes and searches that have ended. Return whether a search has."""
        raise NotImplementedError
