"""Conversations that are not at hand: in memory, or in the folder, the longest unused first to go."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ..arrays import Int32s, common_prefix
from ..errors import ConfigError, KVFlashError
from .folder import Folder, disk_is_full, file_stat
from .shared import Head
from .texts import Texts, new_id, usable

SUFFIX = ".kvs"

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
"""What a file may be called: never a path, and never hidden."""

_SWAPPED = re.compile(r"(?P<id>c-[0-9a-f]{16})~(?P<salt>[0-9a-f]*)~(?P<prompt>[0-9]{1,12})\.kvs")


@dataclass(slots=True, kw_only=True, eq=False)
class Stored:
    """A conversation's file. current: it has all of it. places: where, before its end, it can be gone on from."""

    path: Path
    id: str
    salt: str
    prompt: int
    places: Sequence[int] | None
    current: bool = True

    @property
    def bytes(self) -> int:
        """On the disk; none of a file that has gone."""
        stat = file_stat(self.path)
        return 0 if stat is None else stat.st_size

    @property
    def written(self) -> float:
        """When, in seconds since 1970; 0 of a file that has gone."""
        stat = file_stat(self.path)
        return 0.0 if stat is None else stat.st_mtime


class ConversationFolder:
    """`swapped/` in it has what the server puts aside. Files of names that users give lie beside that.

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
        """The file of a name that a user gives, for a text of this salt. ConfigError if it is none."""
        return self.path / f"{self._stem(name)}{f'~{salt}' if salt else ''}{SUFFIX}"

    def find(self, name: str, may: Callable[[str], bool]) -> tuple[Path, str] | None:
        """The newest file of this name whose text's salt passes `may`, and that salt. ConfigError if it is no name."""
        stem = self._stem(name)
        paths = [self.path / f"{stem}{SUFFIX}", *self.path.glob(f"{stem}~*{SUFFIX}")]
        salts = {path: path.stem[len(stem) + 1 :] for path in paths if path.is_file()}
        own = [path for path, salt in salts.items() if may(salt)]
        newest = max(own, key=lambda path: path.stat().st_mtime_ns, default=None)
        return None if newest is None else (newest, salts[newest])

    @staticmethod
    def _stem(name: str) -> str:
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"{name[:80]!r} cannot name a file: use 1 to 128 of A-Z, a-z, 0-9, '.', '_' and '-', not beginning "
                f"with a dot"
            )
        return name.removesuffix(SUFFIX)

    def place(self, id: str, salt: str, prompt: int, *, places: Sequence[int] | None) -> Stored:
        """Where a conversation goes."""
        return Stored(
            path=self.swapped.path / f"{id}~{salt}~{prompt}{SUFFIX}", id=id, salt=salt, prompt=prompt, places=places
        )

    def stored(self) -> list[Stored]:
        """What is there, the one written longest ago first."""
        found = [
            Stored(path=path, id=name["id"], salt=name["salt"], prompt=int(name["prompt"]), places=None)
            for path, name in self.swapped.files(self.swapped.path)
        ]
        return sorted(found, key=lambda one: one.written)


MAX_CONVERSATIONS = 4096
"""Each is looked at when a request comes that begins as it does."""


class SwappedText(Protocol):
    """A text that was put aside. It goes on bit for bit, and is released when nobody wants it any more."""

    @property
    def tokens(self) -> Int32s: ...

    @property
    def places(self) -> Sequence[int] | None:
        """Where, before its end, it can be gone on from; None for anywhere."""
        ...

    def parts(self) -> Iterator[tuple[int, int]]:
        """What it keeps in memory but for its tokens, as (identity, bytes); several texts may have a part together."""
        ...

    def release(self) -> None: ...


@dataclass(slots=True, kw_only=True, eq=False)
class Conversation:
    """A text that requests go on with. It is at hand, or on the shelf.

    id: ours. name: what requests call it, if they do. salt: whose texts may go on from it. tokens: as it was put aside.
    prompt: how many of them the last request gave; a request that leaves the text before that is another conversation.
    parked: in memory; stored: in the folder. head: its newest state in the store that servers share; stale: another
    server has gone on with it since.
    """

    id: str = field(default_factory=new_id)
    name: str | None = None
    salt: str = ""
    tokens: Int32s
    prompt: int = 0
    swapped: SwappedText | None = None
    stored: Stored | None = None
    head: Head | None = None
    used: float = 0.0
    stale: bool = False

    @property
    def where(self) -> str:
        return "memory" if self.swapped is not None else "folder" if self.stored is not None else "device"

    def usable(self, tokens: Int32s) -> int:
        """How much of a prompt need not be read if it goes on from here."""
        source = self.swapped if self.swapped is not None else self.stored
        return 0 if source is None else usable(self.tokens, source.places, tokens)


@dataclass(slots=True)
class SwapCounts:
    """Conversations that left memory for the folder, that were let go of, and that the folder did not take.

    Of a shared store: states that were written, that were fetched, and conversations that went on as copies.
    """

    stored: int = 0
    dropped: int = 0
    failed: int = 0
    written: int = 0
    taken: int = 0
    copied: int = 0


class SwapStore:
    """capacity: bytes in memory. folder: where those go that find no room, None to let go of them. read: opens a stored
    one, write: stores one, and waits until it is on the disk if its last argument says so. One thread uses it.
    """

    def __init__(
        self,
        *,
        capacity: int,
        folder: ConversationFolder | None = None,
        write: Callable[[SwappedText, Stored, bool], None],
        read: Callable[[Stored], SwappedText],
        most: int = MAX_CONVERSATIONS,
    ) -> None:
        self._capacity = capacity
        self._folder = folder
        self._write = write
        self._read = read
        self._most = most
        self._texts = Texts[Conversation]()
        self.counts = SwapCounts()
        self._held: Conversation | None = None

    def __len__(self) -> int:
        return len(self._texts)

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self._texts)

    def __contains__(self, conversation: Conversation) -> bool:
        return conversation in self._texts

    @property
    def size(self) -> int:
        """Bytes in memory: what several conversations share counts once, and of those in the folder their tokens do."""
        return self._texts.size

    def find(self, tokens: Int32s, *, salt: str, name: str | None) -> tuple[Conversation | None, int]:
        """The conversation that saves most of a prompt, and how much; of equals one of this name, then the newest."""
        best, most = None, (0, False, 0.0)
        for found in self._texts.alike(tokens, salt=salt):
            length = found.usable(tokens)
            key = (length, name is not None and found.name == name, found.used)
            if length and key > most:
                best, most = found, key
        return best, most[0]

    def nearest(self, tokens: Int32s, *, salt: str) -> tuple[int, int]:
        """How much of a prompt the text has that has most of it, and how long that text is."""
        alike = self._texts.alike(tokens, salt=salt)
        return max(((common_prefix(one.tokens, tokens), len(one.tokens)) for one in alike), default=(0, 0))

    def known(self, tokens: Int32s, *, salt: str) -> int:
        """How long a beginning of a prompt is known, whether or not it can be gone on from there."""
        return self._texts.known(tokens, salt=salt)

    def put(self, conversation: Conversation, swapped: SwappedText, now: float) -> None:
        """Put a conversation aside. It holds `swapped` from here on. Others go if there is no room."""
        if conversation in self._texts:
            self.take(conversation)
        self.shelve(conversation, swapped, now)
        self.make_room()

    def shelve(self, conversation: Conversation, swapped: SwappedText, now: float) -> None:
        """The same for a new one, and room is made later."""
        conversation.tokens, conversation.swapped, conversation.used = swapped.tokens, swapped, now
        self.add(conversation)
        self._texts.add_parts(conversation, swapped.parts())

    def add(self, conversation: Conversation) -> None:
        """One that is put aside, or that the folder had when the server began."""
        self._texts.add(conversation, salt=conversation.salt)

    def touch(self, conversation: Conversation, now: float) -> None:
        """It has been gone on from by another: it is the last to go."""
        conversation.used = now
        self._texts.touch(conversation)

    @contextmanager
    def holding(self, conversation: Conversation) -> Iterator[None]:
        """It is being brought back, and stays meanwhile. Room is made once it has left, perhaps: see `take`."""
        self._held = conversation
        try:
            yield
        finally:
            self._held = None
        self.make_room()

    def make_room(self) -> None:
        """Bring memory below its capacity, and the number of conversations below its bound."""
        if self._held is not None:
            return
        while self._texts.size > self._capacity and self.evict():
            pass
        while len(self._texts) > self._most:
            self.counts.dropped += 1
            self.drop(next(iter(self._texts)))

    def evict(self, *, held: bool = False) -> bool:
        """Take the one used longest ago out of memory; False if there is none. held: if need be one on its way back."""
        able = [conversation for conversation in self._texts if conversation.swapped is not None]
        oldest = next((one for one in able if one is not self._held), able[0] if able and held else None)
        if oldest is None:
            return False
        if self.store(oldest, sync=False):  # somebody waits for the room
            self._release(oldest)
            self.counts.stored += 1
        else:
            self.counts.dropped += 1
            self.drop(oldest)
        return True

    def store(self, conversation: Conversation, *, sync: bool = True) -> bool:
        """Write it to the folder, unless it is there as it is; False without one, or if it cannot be written. Where the
        disk is full, those that were used longest ago and are only there go, unless all of them make no room.
        sync: wait until it is on the disk.
        """
        if self._folder is None:
            return False
        if conversation.swapped is None or (conversation.stored is not None and conversation.stored.current):
            return conversation.stored is not None
        place = self._folder.place(
            conversation.id, conversation.salt, conversation.prompt, places=conversation.swapped.places
        )
        swapped = self._folder.swapped
        what, full = f"conversations cannot be stored in {swapped.path}", False
        while True:
            try:
                self._write(conversation.swapped, place, sync)
                break
            except (KVFlashError, OSError) as err:
                swapped.failed(what, err)
                full = True
                if not (disk_is_full(err) and self._forget_file(conversation.swapped)):
                    self.counts.failed += 1
                    return False
        if not full:
            swapped.wrote(what)
        if conversation.stored is not None and conversation.stored.path != place.path:
            self.delete_file(conversation)
        conversation.stored = place
        return True

    def _forget_file(self, swapped: SwappedText) -> bool:
        """Let go of the one used longest ago of those in the folder; False if none is there, or all make no room."""
        assert self._folder is not None
        able = [one for one in self._texts if one.swapped is None and one is not self._held]
        needed = swapped.tokens.nbytes + sum(dict(swapped.parts()).values())
        stored = sum(one.stored.bytes for one in able if one.stored is not None)
        if not able or needed > self._folder.swapped.free + stored:
            return False
        self.counts.dropped += 1
        self.erase(able[0])
        return True

    def open(self, conversation: Conversation) -> SwappedText:
        """What is to be resumed, and released by the caller if it comes from the folder: see `Conversation.swapped`."""
        if conversation.swapped is not None:
            return conversation.swapped
        assert conversation.stored is not None
        return self._read(conversation.stored)

    def take(self, conversation: Conversation) -> None:
        """Off the shelf: it is at hand now. Its memory is let go of, a file stays until a newer one takes its place."""
        self._release(conversation)
        self._texts.remove(conversation)
        if conversation.stored is not None:
            conversation.stored.current = False

    def erase(self, conversation: Conversation) -> None:
        """Forget a conversation, its file too."""
        self._release(conversation)
        self._texts.remove(conversation)
        self.delete_file(conversation)

    def drop(self, conversation: Conversation) -> None:
        """Forget a conversation for want of room."""
        self.erase(conversation)

    def lose(self, conversation: Conversation) -> None:
        """Forget a conversation that cannot be brought back."""
        self.erase(conversation)

    def spoil(self, conversation: Conversation) -> None:
        """A text at hand turned out to be of no use: do not take it over from another server again."""

    def delete_file(self, conversation: Conversation) -> None:
        """Forget the file of a conversation, if it has one."""
        stored, conversation.stored = conversation.stored, None
        if stored is not None and self._folder is not None:
            self._folder.swapped.delete(stored.path)

    def _release(self, conversation: Conversation) -> None:
        swapped, conversation.swapped = conversation.swapped, None
        if swapped is not None:
            self._texts.drop_parts(conversation)
            swapped.release()

    def close(self) -> None:
        """Store what the folder lacks, and let go of everything."""
        for conversation in self:
            self.store(conversation)
            self._release(conversation)
            self._texts.remove(conversation)
