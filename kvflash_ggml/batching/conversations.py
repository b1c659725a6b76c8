"""What can be done with conversations between two requests: on the engine's thread, where nothing else is said."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import KVFlashError
from ..store.shelf import Conversation, SessionFolder, Shelf
from .messages import Access
from .model import Model
from .seat import Seat

logger = logging.getLogger("kvflash_ggml")

T = TypeVar("T")


class Conversations:
    """All texts that a scheduler knows, wherever they are. Use it by `Scheduler.call`, unless a method says otherwise.

    access: of the client. A conversation that it may not see is treated as one that is not known. folder: None where
    conversations have no files.
    """

    def __init__(self, model: Model, seat: Seat, shelf: Shelf, folder: SessionFolder | None) -> None:
        self._model = model
        self._seat = seat
        self._shelf = shelf
        self._folder = folder

    def seen(self, access: Access, read: Callable[[], T]) -> T | None:
        """What `read` tells of the text at hand; None if the text is not for this access. From any thread."""
        before, value = self._seat.conversation, read()
        if not access.owner:
            return value
        # the seat is nobody's while the engine's thread changes the text
        mine = before is not None and access.may(before.salt) and self._seat.conversation is before
        return value if mine else None

    def places(self, access: Access) -> dict[str, int]:
        """How many conversations are where. From any thread: a conversation that moves meanwhile may count twice."""
        seated = self._seat.conversation
        counts = {"device": int(seated is not None and access.may(seated.salt)), "memory": 0, "folder": 0}
        for conversation in self._shelf:
            counts[conversation.where] += access.may(conversation.salt)
        return counts

    def keeps(self, id: str, access: Access) -> bool:
        """Is a conversation known? From any thread; one that moves meanwhile may be missed on any but the engine's."""
        return self._seated(id, access) or self._shelved(id, access) is not None

    def describe(self, access: Access) -> list[dict[str, Any]]:
        """Describe all that are known, the one used last at the end. No text."""
        seated = self._seat.conversation
        known = [*self._shelf, *([seated] if seated is not None else [])]
        return [self._facts(conversation) for conversation in known if access.may(conversation.salt)]

    def _facts(self, one: Conversation) -> dict[str, Any]:
        here = one is self._seat.conversation
        return {
            "id": one.id,
            "tokens": len(self._model.tokens) if here else len(one.tokens),
            "prompt": one.prompt,
            "where": "device" if here else one.where,
            "file": None if one.stored is None else one.stored.path.name,
        }

    def adopt(self) -> None:
        """Take over the conversations that an earlier server left in the folder."""
        adopted: dict[str, Conversation] = {}
        for stored in self._folder.stored() if self._folder is not None else ():
            try:
                parked = self._model.read(stored.path)
            except (KVFlashError, OSError) as err:
                logger.warning("%s is left alone: %s", stored.path.name, err)
                continue
            stored.places = parked.places
            known = Conversation(
                id=stored.id, salt=stored.salt, tokens=parked.tokens.copy(), prompt=stored.prompt, stored=stored
            )
            parked.release()
            if known.id in adopted:  # the earlier server was killed before it could delete this file
                self._shelf.erase(adopted[known.id])
            adopted[known.id] = known
            self._shelf.add(known)

    def park(self, id: str, access: Access) -> bool:
        """Put a conversation aside; False if it is not known."""
        if self._seated(id, access):
            self._seat.park()
            return True
        return self._shelved(id, access) is not None

    def save(self, id: str, access: Access) -> bool:
        """Write a conversation to the folder; False if it is not known, or cannot be written."""
        if self._seated(id, access):
            self._seat.park()
        found = self._shelved(id, access)
        return found is not None and self._shelf.store(found)

    def erase(self, id: str, access: Access) -> bool:
        """Forget a conversation, its file too; False if it is not known."""
        if self._seated(id, access):
            self.erase_seated(access)
            return True
        found = self._shelved(id, access)
        if found is not None:
            self._shelf.erase(found)
        return found is not None

    def pin(self, id: str, lo: int, hi: int, access: Access) -> bool:
        """Keep tokens of the conversation at hand on the device; False if it is another."""
        if not self._seated(id, access):
            return False
        self._model.pin(lo, hi)
        return True

    def erase_seated(self, access: Access) -> int:
        """Forget the text at hand; how many tokens it had."""
        count, mine = self.seen(access, lambda: len(self._model.tokens)), self._seat.conversation
        if count is None:
            return 0
        self._seat.clear()
        if mine is not None:
            self._shelf.delete_file(mine)
        return count

    def save_seated(self, name: str, access: Access) -> tuple[int, int] | None:
        """Write the text at hand to the folder's file of this name; how many tokens and bytes, None without a text.

        ConfigError for a name that is none.
        """
        assert self._folder is not None
        seated = self.seen(access, lambda: self._seat.conversation)
        if seated is None and access.owner:
            return None
        path = self._folder.named(name, "" if seated is None else seated.salt)
        parked = self._model.park()
        try:
            self._model.write(parked, path, sync=True)
            return len(parked.tokens), path.stat().st_size
        finally:
            parked.release()

    def load_seated(self, name: str, access: Access) -> int | None:
        """Put a file's text in place of the one at hand, which is put aside; how many tokens it has, None for no file.

        ConfigError for a name that is none.
        """
        assert self._folder is not None
        found = self._folder.find(name, access.may)
        if found is None:
            return None
        path, salt = found
        parked = self._model.read(path)
        try:
            self._seat.load(parked, salt)
            return len(parked.tokens)
        finally:
            parked.release()

    def _seated(self, id: str, access: Access) -> bool:
        seated = self._seat.conversation
        return seated is not None and seated.id == id and access.may(seated.salt)

    def _shelved(self, id: str, access: Access) -> Conversation | None:
        return next((one for one in self._shelf if one.id == id and access.may(one.salt)), None)
