"""Texts that the servers of one model share: each of them can continue a conversation of another.

All objects are immutable. `blocks/HASH` holds a part of a snapshot and is named by its content, so that two states of a
text share the blocks of their common beginning. `heads/BEGIN/ID~NUMBER` lists the blocks of one state of a
conversation. The head with the largest number counts. Creating the next number is the compare-and-swap: only one
server succeeds, and no clock matters. A server that finds it taken keeps its text as another conversation.
`heads/BEGIN/ID~NUMBER~MARKS` is empty. Its name describes the text, so that a search reads few heads.
`heads/BEGIN/ID~NUMBER~MARKS~soon` announces a state that a server is writing, so that a search waits for it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvflash_ggml.arrays import Int32s
from kvflash_ggml.constants import CHUNK
from kvflash_ggml.errors import SnapshotError
from kvflash_ggml.store.texts import new_id, usable

from .objects import MAX_OBJECT, Objects

logger = logging.getLogger("kvflash_ggml")

FIRST = 64
"""Bytes of a snapshot that differ in each state of a text. The head has them, and the blocks have the rest."""

BLOCK = 4 << 20

CHECKSUM = 64
"""Characters of the checksum that a head begins with."""

MAX_TOKENS = 1 << 26
MAX_BYTES = 1 << 42
RATE_SHARE = 0.3
"""Weight of the newest transfer in the mean rate."""

ANNOUNCED = 1024
"""Tokens of the shortest text that is announced. Shorter ones are quick to write, and quick to read."""

ANNOUNCED_S = 10.0
"""Seconds that a search waits for a text that is announced. The server that announced it may have died."""

OLD_S = 60.0
"""Age in seconds from which a search ignores an announcement, by the clocks of the store and of this machine."""

POLL_S = 0.1

MOST_READ = 4
"""Maximum heads that a search reads. Thousands of texts may share a system prompt."""

_HEAD = re.compile(
    r"heads/(?P<begin>[0-9a-f]{32})/(?P<id>c-[0-9a-f]{16})~(?P<number>[0-9]{8})"
    r"(~(?P<chunks>[0-9a-f]{1,6})-(?P<end>[0-9a-f]{8})(?P<steps>([0-9a-f]{4}){0,24})(?P<soon>~soon)?)?"
)
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, eq=False, kw_only=True)
class Head:
    """One state of a conversation. number: counts its states. places: see `usable`. blocks: hashes, in order.

    size: bytes of the snapshot. first: its first FIRST bytes. made: the devices that computed it.
    """

    id: str
    number: int
    salt: str
    made: str
    prompt: int
    places: tuple[int, ...] | None
    tokens: Int32s
    first: bytes
    size: int
    blocks: tuple[str, ...]

    @property
    def begin(self) -> str:
        return begin_of(self.tokens, self.salt)

    @property
    def name(self) -> str:
        return head_name(self.begin, self.id, self.number)


def head_name(begin: str, id: str, number: int) -> str:
    """Return the name of the object of a state."""
    return f"heads/{begin}/{id}~{number:08}"


def begin_of(tokens: Int32s, salt: str) -> str:
    """Return the folder of all texts with this first chunk and salt."""
    return hashlib.sha256(f"{salt}\0".encode() + tokens[:CHUNK].astype("<i4").tobytes()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Name:
    """The name of a head, or of its marks: chunks, a hash of them, and hashes of the first 2, 4, 8, ... of them.

    soon: the state is being written.
    """

    begin: str
    id: str
    number: int
    marks: tuple[int, str, tuple[str, ...]] | None = None
    soon: bool = False


def parse_name(name: str) -> Name | None:
    """Return the parts of a name; None for the name of another object."""
    found = _HEAD.fullmatch(name)
    if found is None:
        return None
    marks = None
    if found["end"] is not None:
        steps = found["steps"]
        marks = int(found["chunks"], 16), found["end"], tuple(steps[i : i + 4] for i in range(0, len(steps), 4))
    return Name(found["begin"], found["id"], int(found["number"]), marks, found["soon"] is not None)


def chunk_hashes(tokens: Int32s) -> list[str]:
    """Return a hash of the first chunk, of the first two chunks, and so on."""
    sha, hashes = hashlib.sha256(), []
    for at in range(0, len(tokens) - len(tokens) % CHUNK, CHUNK):
        sha.update(tokens[at : at + CHUNK].astype("<i4").tobytes())
        hashes.append(sha.hexdigest()[:8])
    return hashes


def marks_of(tokens: Int32s) -> str:
    """Return the marks of a text of at least a chunk, as they stand in a name."""
    hashes = chunk_hashes(tokens)
    steps = [hashes[(2 << i) - 1][:4] for i in range(24) if 2 << i <= len(hashes)]
    return f"{len(hashes):x}-{hashes[-1]}{''.join(steps)}"


def alike(marks: tuple[int, str, tuple[str, ...]] | None, hashes: list[str]) -> tuple[int, int]:
    """Return two bounds of the chunks that a text of these marks shares with those of `hashes`: at least, below."""
    if marks is None:
        return 1, 1 << 30
    chunks, end, steps = marks
    if 0 < chunks <= len(hashes) and hashes[chunks - 1] == end:
        return chunks, chunks + 1
    shared = 1
    for step in steps:
        if 2 * shared > len(hashes) or hashes[2 * shared - 1][:4] != step:
            break
        shared *= 2
    return shared, 2 * shared


def encode(head: Head) -> bytes:
    """Return the bytes of a head: a line with the hash of the rest, then JSON."""
    tokens = base64.b64encode(zlib.compress(head.tokens.astype("<i4").tobytes(), 1)).decode()
    facts = {
        "id": head.id, "number": head.number, "salt": head.salt, "made": head.made, "prompt": head.prompt,
        "count": len(head.tokens), "places": head.places, "tokens": tokens,
        "bytes": head.size, "first": head.first.hex(), "blocks": head.blocks,
    }  # fmt: skip
    body = json.dumps(facts).encode()
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def decode(name: str, data: bytes) -> Head:
    """Read a head. SnapshotError, with the object's name, if it is damaged or belongs to another name."""
    said, _, body = data[:MAX_OBJECT].partition(b"\n")
    if len(data) > MAX_OBJECT or said.decode("latin-1") != hashlib.sha256(body).hexdigest():
        raise SnapshotError(f"{name} is damaged: it does not match its checksum")
    try:
        head = _head(json.loads(body))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, zlib.error) as err:
        raise SnapshotError(f"{name} is no head of a text: {type(err).__name__} {err}") from err
    if parse_name(name) != Name(head.begin, head.id, head.number):
        raise SnapshotError(f"{name} is the head of another text: {head.name}")
    return head


def _head(facts: dict[str, object]) -> Head:
    """Check every fact: the store may be hostile. ValueError and others for an impossible one."""

    def whole(value: object, limit: int) -> int:
        if type(value) is not int or not 0 <= value <= limit:
            raise ValueError(f"{value!r:.40} is no number up to {limit}")
        return value

    count, size = whole(facts["count"], MAX_TOKENS), whole(facts["bytes"], MAX_BYTES)
    stream = zlib.decompressobj()
    raw = stream.decompress(base64.b64decode(str(facts["tokens"]), validate=True), 4 * count + 1)
    first, blocks, places = bytes.fromhex(str(facts["first"])), facts["blocks"], facts["places"]
    salt, id, made = facts["salt"], facts["id"], facts["made"]
    if len(raw) != 4 * count or len(first) != min(FIRST, size):
        raise ValueError("its tokens or first bytes are cut short")
    if not isinstance(blocks, list) or len(blocks) != -(-(size - len(first)) // BLOCK):
        raise ValueError("it has other blocks than its size needs")
    if not all(isinstance(block, str) and _HASH.fullmatch(block) for block in blocks):
        raise ValueError("a block has no hash for a name")
    if not isinstance(salt, str) or not re.fullmatch(r"[0-9a-f]*", salt) or not isinstance(id, str):
        raise ValueError("its salt or id is none")
    if not isinstance(made, str) or len(made) > 200 or not made.isprintable():
        raise ValueError("its devices are none")
    if places is not None and not isinstance(places, list):
        raise ValueError("its places are none")
    return Head(
        id=id, number=whole(facts["number"], 10**8 - 1), salt=salt, made=made, prompt=whole(facts["prompt"], count),
        places=None if places is None else tuple(whole(place, count) for place in places),
        tokens=np.frombuffer(raw, "<i4").astype(np.int32), size=size, first=first, blocks=tuple(blocks),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A state to write. base: the head that this server continued, None for a new conversation."""

    id: str
    salt: str
    prompt: int
    places: Sequence[int] | None
    tokens: Int32s
    base: Head | None

    @property
    def number(self) -> int:
        """The number that it gets, unless another server has continued the conversation since `base`."""
        return 1 if self.base is None else self.base.number + 1


class SharedTexts:
    """The store of one model. Any thread uses it.

    made: the devices of this server. bandwidth: bytes per second at most, 0 for no limit. clock, sleep: seconds.
    wall: seconds since 1970.
    """

    def __init__(
        self,
        objects: Objects,
        *,
        made: str = "",
        bandwidth: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._objects = objects
        self.made = made
        self._bandwidth = bandwidth
        self._clock = clock
        self._sleep = sleep
        self._wall = wall
        self._closed = False
        self._announced = set[str]()
        self._unsure: dict[str, bytes] = {}  # heads whose writing failed, and that may be there, with their checksums
        self._left: dict[str, tuple[str, ...]] = {}  # earlier heads and marks of a text that got another id, by that
        self._taking = threading.Lock()
        self._free = 0.0  # when the next transfer may begin
        self._lock = threading.Lock()
        self.rate: float | None = None
        """Bytes per second of what was fetched, a moving mean; None before the first."""

    def latest(self, begin: str) -> dict[str, int]:
        """Return the newest number of each conversation of a folder. OSError."""
        return {id: name.number for id, name in self._names(begin)[0].items()}

    def _names(self, begin: str) -> tuple[dict[str, Name], dict[str, Name]]:
        """Return the newest number of each conversation, with its marks, and the announcements. OSError."""
        numbers, marks, soon = dict[str, int](), dict[str, Name](), dict[str, Name]()
        for one in self._objects.list(f"heads/{begin}"):
            name = parse_name(one.name)
            if name is None:
                continue
            if name.soon:
                if self._wall() - one.modified < OLD_S:
                    soon[one.name] = name
            elif name.marks is None:
                numbers[name.id] = max(numbers.get(name.id, 0), name.number)
            elif name.id not in marks or marks[name.id].number < name.number:
                marks[name.id] = name
        names = {
            id: Name(begin, id, number, marks[id].marks if id in marks else None) for id, number in numbers.items()
        }
        return names, {name: one for name, one in soon.items() if numbers.get(one.id, 0) < one.number}

    def search(
        self, tokens: Int32s, *, salt: str, cached: int, numbers: Mapping[str, float], refused: set[str]
    ) -> tuple[Head | None, Collection[str]]:
        """Return the state that saves most tokens of a prompt, and all ids. None if none saves more than `cached`.

        numbers: states that this server has, by the id of their conversation. refused: names to skip, to which the
        search adds damaged heads. OSError.
        """
        begin, hashes, until = begin_of(tokens, salt), chunk_hashes(tokens), self._clock() + ANNOUNCED_S
        while True:
            names, soon = self._names(begin)
            there = max((alike(one.marks, hashes)[0] for one in names.values() if one.marks is not None), default=0)
            # of as many chunks as are there, the announced state is the later one
            least = max(there, cached // CHUNK + 1)
            awaited = [
                name
                for name, one in soon.items()
                if name not in refused and numbers.get(one.id, 0) < one.number and alike(one.marks, hashes)[0] >= least
            ]
            if not awaited:
                break
            if self._clock() >= until or self._closed:
                refused.update(awaited)  # no search waits for these again
                break
            self._sleep(POLL_S)
        shared = {id: alike(name.marks, hashes) for id, name in names.items() if numbers.get(id, 0) < name.number}
        likely = sorted((id for id, (_, below) in shared.items() if below * CHUNK > cached), key=lambda id: shared[id])
        best, longest = None, cached
        for id in likely[: -MOST_READ - 1 : -1]:
            name = head_name(begin, id, names[id].number)
            if name in refused:
                continue
            try:
                head = self.read(begin, id, names[id].number)
            except FileNotFoundError:  # another server has just replaced it
                continue
            except SnapshotError as err:
                refused.add(name)
                logger.warning("a conversation of the store is left alone: %s", err)
                continue
            length = usable(head.tokens, head.places, tokens)
            if length > longest:
                best, longest = head, length
        return best, names.keys()

    def read(self, begin: str, id: str, number: int) -> Head:
        """Read a head. SnapshotError if it is damaged, OSError if it cannot be had."""
        name = head_name(begin, id, number)
        return decode(name, self._objects.get(name))

    @contextmanager
    def announced(self, draft: Draft) -> Iterator[None]:
        """Let other servers know that a state is being written. OSError."""
        try:
            self.announce(draft.id, draft.number, draft.tokens, draft.salt)
            yield
        finally:
            self.withdraw(draft.id, draft.number)

    def announce(self, id: str, number: int, tokens: Int32s, salt: str) -> None:
        """Announce a state, until `withdraw`. A short text is not announced. OSError."""
        if len(tokens) >= ANNOUNCED:
            name = f"{head_name(begin_of(tokens, salt), id, number)}~{marks_of(tokens)}~soon"
            self._objects.put(name, b"")
            # after it: withdrawing what failed would wait a second time for a store that hangs, and OLD_S ends it
            self._announced.add(name)

    def withdraw(self, id: str | None = None, number: float = float("inf")) -> None:
        """Delete what was announced here of a conversation, up to this number; without arguments everything.

        If the store fails, the announcement goes with the next one, or is ignored from OLD_S on.
        """
        for name in sorted(self._announced):
            state = parse_name(name)
            assert state is not None
            if id in (state.id, None) and state.number <= number:
                with suppress(OSError):
                    self._objects.delete(name)
                    self._announced.discard(name)

    def close(self) -> None:
        """Withdraw what was announced here, and end searches, and transfers to here."""
        self._closed = True
        self.withdraw()

    def publish(self, draft: Draft, path: Path) -> Head:
        """Write a state whose snapshot is the file `path`, first its blocks, and return its head. OSError.

        The head has another id than the draft if another server has continued the conversation since `base`.
        """
        begin, base = begin_of(draft.tokens, draft.salt), draft.base
        same = base if base is not None and base.begin == begin else None  # a text can lose its first chunk
        there = set[str]()
        if same is not None and self.latest(begin).get(same.id, 0) >= same.number:
            there.update(same.blocks)
        blocks = list[str]()
        with path.open("rb") as file:
            first = file.read(FIRST)
            while data := file.read(BLOCK):
                blocks.append(hashlib.sha256(data).hexdigest())
                if blocks[-1] not in there:
                    self._wait(len(data))
                    self._objects.put(f"blocks/{blocks[-1]}", data)
        id, number = draft.id, 1 if same is None else same.number + 1
        while True:
            head = Head(
                id=id, number=number, salt=draft.salt, made=self.made, prompt=draft.prompt,
                places=None if draft.places is None else tuple(draft.places), tokens=draft.tokens,
                size=path.stat().st_size, first=first, blocks=tuple(blocks),
            )  # fmt: skip
            if self._take(head):
                break
            id, number = new_id(), 1
        replaced = () if base is None else (base.name, f"{base.name}~{marks_of(base.tokens)}")
        if base is not None and head.id != base.id:
            self._left[head.id] = (*self._left.pop(base.id, ()), *replaced)  # another server may go on from this state
            replaced = ()
        with suppress(OSError):  # the state is written: marks save time, and `prune` deletes what is left
            self._objects.put(f"{head.name}~{marks_of(head.tokens)}", b"")
            for name in replaced:
                self._objects.delete(name)
        return head

    def _take(self, head: Head) -> bool:
        """Create a head; False if another server was faster. OSError: perhaps it is there."""
        data = encode(head)
        with self._taking:
            if self._unsure.setdefault(head.name, data[:CHECKSUM]) != data[:CHECKSUM]:
                return False  # another server may have seen what was to be there, and go on from that
            created = self._objects.create(head.name, data)
            # earlier heads are deleted: the number may be free and yet not the newest
            newest = created and self.latest(head.begin).get(head.id, 0) <= head.number
            if created and not newest:
                self._objects.delete(head.name)
            del self._unsure[head.name]
        return newest

    def undo(self) -> None:
        """Delete the states whose writing failed here, and that are there nevertheless. OSError."""
        with self._taking:
            for name, checksum in self._unsure.items():
                with suppress(FileNotFoundError):
                    if checksum and self._objects.get(name)[:CHECKSUM] == checksum:
                        self._objects.delete(name)
                self._unsure[name] = b""  # of no state: the name is not used again

    def fetch(self, head: Head, path: Path) -> None:
        """Write the snapshot of a state to a file. SnapshotError if a block is gone or damaged, OSError."""
        began = self._clock()
        with path.open("wb") as file:
            file.write(head.first)
            left = head.size - len(head.first)
            for block in head.blocks:
                if self._closed:
                    raise OSError("the server ends")
                size = min(BLOCK, left)
                self._wait(size)
                file.write(self._block(block, size))
                left -= size
        rate = head.size / max(self._clock() - began, 1e-6)
        self.rate = rate if self.rate is None else self.rate + RATE_SHARE * (rate - self.rate)

    def _block(self, hash: str, size: int) -> bytes:
        name = f"blocks/{hash}"
        try:
            data = self._objects.get(name)
        except FileNotFoundError as err:
            raise SnapshotError(f"{name} has gone from the store") from err
        if len(data) != size or hashlib.sha256(data).hexdigest() != hash:
            self._objects.delete(name)  # so that the next write of this block writes it again
            raise SnapshotError(f"{name} is damaged: {len(data)} bytes that do not match its name")
        return data

    def forget(self, head: Head) -> None:
        """Delete a state with a missing or damaged block. OSError."""
        self._objects.delete(head.name)

    def erase(self, begin: str, id: str) -> int:
        """Forget a conversation, and return its newest number. Its blocks go with the next `prune`. OSError."""
        newest = 0
        for left in self._left.get(id, ()):
            self._objects.delete(left)
        for one in self._objects.list(f"heads/{begin}"):
            name = parse_name(one.name)
            if name is not None and name.id == id:
                self._objects.delete(one.name)
                newest = max(newest, name.number)
        return newest

    def _wait(self, size: int) -> None:
        """Wait until so many bytes may be transferred, in turn with other threads."""
        if not self._bandwidth:
            return
        with self._lock:
            now = self._clock()
            begin = max(now, self._free)
            self._free = end = begin + size / self._bandwidth
        self._sleep(end - now)
