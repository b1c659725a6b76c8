"""What can be done with conversations between two requests: on the engine's thread, where nothing else is said."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import KVFlashError
from ..store.swapped import Conversation, ConversationFolder, SwapStore
from .messages import Access
from .model import Model
from .slot import Slot

logger = logging.getLogger("kvflash_ggml")

T = TypeVar("T")


class Conversations:
    """All texts that a scheduler knows, wherever they are. Use it by `Scheduler.call`, unless a method says otherwise.

    access: of the client. A conversation that it may not see is treated as one that is not known. folder: None where
    conversations have no files.
    """

    def __init__(self, model: Model, slot: Slot, store: SwapStore, folder: ConversationFolder | None) -> None:
        self._model = model
        self._slot = slot
        self._store = store
        self._folder = folder

    def seen(self, access: Access, read: Callable[[], T]) -> T | None:
        """What `read` tells of the text at hand; None if the text is not for this access. From any thread."""
        before, value = self._slot.conversation, read()
        if not access.owner:
            return value
        # the slot is empty while the engine's thread changes the text
        mine = before is not None and access.may(before.salt) and self._slot.conversation is before
        return value if mine else None

    def places(self, access: Access) -> dict[str, int]:
        """How many conversations are where. From any thread: a conversation that moves meanwhile may count twice."""
        running = self._slot.conversation
        counts = {"device": int(running is not None and access.may(running.salt)), "memory": 0, "folder": 0}
        for conversation in self._store:
            counts[conversation.where] += access.may(conversation.salt)
        return counts

    def keeps(self, id: str, access: Access) -> bool:
        """Is a conversation known? From any thread; one that moves meanwhile may be missed on any but the engine's."""
        return self._running(id, access) or self._swapped(id, access) is not None

    def describe(self, access: Access) -> list[dict[str, Any]]:
        """Describe all that are known, the one used last at the end. No text."""
        running = self._slot.conversation
        known = [*self._store, *([running] if running is not None else [])]
        return [self._facts(conversation) for conversation in known if access.may(conversation.salt)]

    def _facts(self, one: Conversation) -> dict[str, Any]:
        here = one is self._slot.conversation
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
                swapped = self._model.read(stored.path)
            except (KVFlashError, OSError) as err:
                logger.warning("%s is left alone: %s", stored.path.name, err)
                continue
            stored.places = swapped.places
            known = Conversation(
                id=stored.id, salt=stored.salt, tokens=swapped.tokens.copy(), prompt=stored.prompt, stored=stored
            )
            swapped.release()
            if known.id in adopted:  # the earlier server was killed before it could delete this file
                self._store.erase(adopted[known.id])
            adopted[known.id] = known
            self._store.add(known)

    def swap_out(self, id: str, access: Access) -> bool:
        """Put a conversation aside; False if it is not known."""
        if self._running(id, access):
            self._slot.swap_out()
            return True
        return self._swapped(id, access) is not None

    def save(self, id: str, access: Access) -> bool:
        """Write a conversation to the folder; False if it is not known, or cannot be written."""
        if self._running(id, access):
            self._slot.swap_out()
        found = self._swapped(id, access)
        return found is not None and self._store.store(found)

    def erase(self, id: str, access: Access) -> bool:
        """Forget a conversation, its file too; False if it is not known."""
        if self._running(id, access):
            self.erase_running(access)
            return True
        found = self._swapped(id, access)
        if found is not None:
            self._store.erase(found)
        return found is not None

    def pin(self, id: str, lo: int, hi: int, access: Access) -> bool:
        """Keep tokens of the conversation at hand on the device; False if it is another."""
        if not self._running(id, access):
            return False
        self._model.pin(lo, hi)
        return True

    def erase_running(self, access: Access) -> int:
        """Forget the text at hand; how many tokens it had."""
        count, mine = self.seen(access, lambda: len(self._model.tokens)), self._slot.conversation
        if count is None:
            return 0
        self._slot.clear()
        if mine is not None:
            self._store.delete_file(mine)
        return count

    def save_running(self, name: str, access: Access) -> tuple[int, int] | None:
        """Write the text at hand to the folder's file of this name; how many tokens and bytes, None without a text.

        ConfigError for a name that is none.
        """
        assert self._folder is not None
        running = self.seen(access, lambda: self._slot.conversation)
        if running is None and access.owner:
            return None
        path = self._folder.named(name, "" if running is None else running.salt)
        swapped = self._model.swap_out()
        try:
            self._model.write(swapped, path, sync=True)
            return len(swapped.tokens), path.stat().st_size
        finally:
            swapped.release()

    def load_running(self, name: str, access: Access) -> int | None:
        """Put a file's text in place of the one at hand, which is put aside; how many tokens it has, None for no file.

        ConfigError for a name that is none.
        """
        assert self._folder is not None
        found = self._folder.find(name, access.may)
        if found is None:
            return None
        path, salt = found
        swapped = self._model.read(path)
        try:
            self._slot.load(swapped, salt)
            return len(swapped.tokens)
        finally:
            swapped.release()

    def _running(self, id: str, access: Access) -> bool:
        running = self._slot.conversation
        return running is not None and running.id == id and access.may(running.salt)

    def _swapped(self, id: str, access: Access) -> Conversation | None:
        return next((one for one in self._store if one.id == id and access.may(one.salt)), None)
