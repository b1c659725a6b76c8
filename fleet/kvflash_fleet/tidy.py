"""Lists and verifies a store that servers share, and finds the objects that may be deleted. Needs no model.

Servers may use the store meanwhile. Objects that they have just written stay: see GRACE_S. In the worst case a server
finds that a block is gone, and prefills that text.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvflash_ggml.errors import SnapshotError
from kvflash_ggml.files import PART

from .objects import Listed, Objects
from .shared import Head, decode, parse_name

GRACE_S = 3600.0
"""Age from which an unused block may be deleted: before, a server may be about to write its state."""

_PLACE = re.compile(r"(?P<model>[0-9a-f]{32})/(?P<name>.+)")
_BLOCK = re.compile(r"blocks/[0-9a-f]{64}")
_PROBE = re.compile(r"probe-[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class State:
    """The newest state of a conversation. head: None for a damaged one, of which `why` tells the error."""

    object: Listed
    head: Head | None
    why: str = ""


@dataclass(slots=True)
class ModelTexts:
    """The objects of one model. blocks: by hash. left: objects that no state needs, or needs yet."""

    model: str
    states: list[State] = field(default_factory=list)
    blocks: dict[str, Listed] = field(default_factory=dict)
    left: list[Listed] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        objects = [*(state.object for state in self.states), *self.blocks.values(), *self.left]
        return sum(one.size for one in objects)


@dataclass(frozen=True, slots=True)
class Removable:
    """An object that may be deleted. why: "old", "room", "damaged" or "left over"."""

    name: str
    size: int
    why: str


def survey(objects: Objects) -> list[ModelTexts]:
    """Read all heads of a store. Objects of other names are left out. OSError."""
    found: dict[str, ModelTexts] = {}
    heads: dict[tuple[str, str, str], list[Listed]] = {}
    listed = {one.name: one for one in objects.list("")}
    listed |= {one.name: one for one in objects.list("")}  # heads that were replaced during the first listing
    for _, one in sorted(listed.items()):
        place = _PLACE.fullmatch(one.name)
        if place is None:
            continue
        texts = found.setdefault(place["model"], ModelTexts(place["model"]))
        name = parse_name(place["name"])
        if _BLOCK.fullmatch(place["name"]):
            texts.blocks[place["name"].removeprefix("blocks/")] = one
        elif name is not None and name.marks is None:
            heads.setdefault((texts.model, name.begin, name.id), []).append(one)
        elif name is not None or one.name.endswith(PART) or _PROBE.fullmatch(place["name"]):
            texts.left.append(one)
    for key, (*old, newest) in heads.items():
        found[key[0]].left += old
        state = _state(objects, newest, *key)
        if state is not None:
            found[key[0]].states.append(state)
    for texts in found.values():
        names = {state.object.name for state in texts.states}
        texts.left = [one for one in texts.left if one.name.rpartition("~")[0] not in names]  # the rest are its marks
    return list(found.values())


def _state(objects: Objects, one: Listed, model: str, begin: str, id: str) -> State | None:
    """Read the head of a conversation, or the one that has replaced it since; None if it was erased. OSError."""
    while True:
        try:
            return State(one, decode(one.name.removeprefix(f"{model}/"), objects.get(one.name)))
        except SnapshotError as err:
            return State(one, None, str(err))
        except FileNotFoundError:
            heads = [
                other
                for other in objects.list(f"{model}/heads/{begin}")
                if (name := parse_name(other.name.removeprefix(f"{model}/"))) is not None
                and (name.id, name.marks) == (id, None)
            ]
            if not heads:
                return None
            one = max(heads, key=lambda other: other.name)


def problems(objects: Objects, texts: ModelTexts) -> Iterator[str]:
    """Read every block of a model, and yield a sentence for each object that is damaged or missing. OSError."""
    yield from (state.why for state in texts.states if state.head is None)
    damaged = set[str]()
    for hash, one in texts.blocks.items():
        try:
            if hashlib.sha256(objects.get(one.name)).hexdigest() != hash:
                damaged.add(hash)
                yield f"{one.name} is damaged: it does not match its name"
        except FileNotFoundError:
            continue
    for state in texts.states:
        missing = set() if state.head is None else set(state.head.blocks) - texts.blocks.keys()
        if missing:
            yield f"{state.object.name} lacks {len(missing)} of its blocks"


def removable(
    texts: list[ModelTexts], *, now: float, older_than: float | None = None, larger_than: int | None = None
) -> list[Removable]:
    """Return the objects that may be deleted, in this order: states come before their blocks.

    older_than: seconds since a conversation was written. larger_than: bytes of all; conversations that were written
    longest ago go first. Damaged heads go too, and objects that no state has needed for GRACE_S.
    """
    gone: list[Removable] = []
    kept: list[tuple[ModelTexts, State]] = []
    for one in texts:
        for state in one.states:
            age = now - state.object.modified
            why = "damaged" if state.head is None else "old" if older_than is not None and age > older_than else None
            if why is None:
                kept.append((one, state))
            else:
                gone.append(Removable(state.object.name, state.object.size, why))
    kept.sort(key=lambda pair: pair[1].object.modified)
    holders = Counter[tuple[str, str]]()
    for one, state in kept:
        holders.update({(one.model, hash) for hash in _blocks(state) & one.blocks.keys()})
    sizes = {(one.model, hash): block.size for one in texts for hash, block in one.blocks.items()}
    total = sum(sizes[key] for key in holders) + sum(state.object.size for _, state in kept)
    for one, state in kept:
        if larger_than is None or total <= larger_than:
            break
        gone.append(Removable(state.object.name, state.object.size, "room"))
        total -= state.object.size
        for hash in _blocks(state) & one.blocks.keys():
            holders[one.model, hash] -= 1
            if not holders[one.model, hash]:
                total -= sizes[one.model, hash]
    for one in texts:
        free = [block for hash, block in one.blocks.items() if not holders[one.model, hash]]
        for left in [*one.left, *free]:
            if now - left.modified > GRACE_S:
                gone.append(Removable(left.name, left.size, "left over"))
    return gone


def _blocks(state: State) -> set[str]:
    return set() if state.head is None else set(state.head.blocks)
