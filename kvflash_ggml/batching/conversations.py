"""What can be done with conversations between two requests: on the engine's thread, where nothing else is said."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..constants import CHUNK
from ..errors import KVFlashError
from ..store.swapped import Conversation, ConversationFolder, Stored, SwapStore
from .behind import Behind
from .messages import Access
from .slot import Slot

logger = logging.getLogger("kvflash_ggml")

T = TypeVar("T")


class ConversationBusy(KVFlashError):
    """The text changes at each step: nothing can be done with it now."""


class Conversations:
    """All texts that a scheduler knows, wherever they are. Use it by `Scheduler.call`, unless a method says otherwise.

    access: of the client. A conversation that it may not see is treated as one that is not known. folder: None where
    conversations have no files. behind: what is still to be read of them.
    """

    def __init__(
        self, slots: Sequence[Slot], store: SwapStore, folder: ConversationFolder | None, behind: Behind
    ) -> None:
        self._slots = slots
        self._store = store
        self._folder = folder
        self._behind = behind
        self.slot = slots[0]
        """The slot that was taken last, whose text is "the one at hand"."""

    def seen(self, access: Access, read: Callable[[], T]) -> T | None:
        """Return what `read` tells of the text at hand; None if that is not for this access. From any thread."""
        slot = self.slot
        before, value = slot.conversation, read()
        if not access.owner:
            return value
        # the slot is empty while the engine's thread changes the text
        mine = before is not None and access.may(before.salt) and slot.conversation is before and self.slot is slot
        return value if mine else None

    def places(self, access: Access) -> dict[str, int]:
        """Count how many conversations are where. From any thread: one that moves meanwhile may count twice."""
        counts = {"device": sum(access.may(one.salt) for one in self._held()), "memory": 0, "folder": 0}
        for conversation in self._store:
            counts[conversation.where] += access.may(conversation.salt)
        return counts

    def keeps(self, id: str, access: Access) -> bool:
        """Tell whether a conversation is known. On another thread than the engine's one that moves may be missed."""
        held = any(one.id == id and access.may(one.salt) for one in self._held())
        return held or self._swapped(id, access) is not None

    def unused(self, id: str) -> str:
        """Return the identifier for a conversation that begins; "" where a conversation has it already."""
        return "" if id and self.keeps(id, Access()) else id

    def describe(self, access: Access) -> list[dict[str, Any]]:
        """Describe all conversations, the one used last at the end. No text."""
        conversations = [*self._store, *self._held()]
        return [self._facts(conversation) for conversation in conversations if access.may(conversation.salt)]

    def _held(self) -> list[Conversation]:
        """Return what the slots hold, the one used last at the end."""
        slots = sorted(self._slots, key=lambda slot: slot.used)
        return [slot.conversation for slot in slots if slot.conversation is not None]

    def _facts(self, one: Conversation) -> dict[str, Any]:
        slot = next((slot for slot in self._slots if slot.conversation is one), None)
        return {
            "id": one.id,
            "tokens": len(one.tokens) if slot is None else len(slot.model.tokens),
            "prompt": one.prompt,
            "where": one.where if slot is None else "device",
            "file": None if one.stored is None else one.stored.path.name,
        }

    def adopt(self) -> None:
        """Take over the conversations that an earlier server left in the folder."""
        adopted: dict[str, Conversation] = {}
        for path, name in self._folder.stored() if self._folder is not None else ():
            try:
                swapped = self._slots[0].model.read(path)
            except (KVFlashError, OSError) as err:
                logger.warning("%s is left alone: %s", path.name, err)
                continue
            stored = Stored(path=path, places=swapped.places)
            conversation = Conversation(
                id=name["id"],
                salt=name["salt"],
                prompt=int(name["prompt"]),
                tokens=swapped.tokens.copy(),
                stored=stored,
            )
            swapped.release()
            if conversation.id in adopted:  # the earlier server was killed before it could delete this file
                self._store.erase(adopted[conversation.id])
            adopted[conversation.id] = conversation
            self._store.add(conversation, salt=conversation.salt, least=conversation.prompt or CHUNK)

    def swap_out(self, id: str, access: Access) -> bool:
        """Put a conversation aside; False if it is not known."""
        slot = self._slot_of(id, access)
        if slot is not None:
            slot.swap_out()
            return True
        return self._swapped(id, access) is not None

    def save(self, id: str, access: Access) -> bool:
        """Write a conversation to the folder; False if it is not known, or cannot be written."""
        slot = self._slot_of(id, access)
        if slot is not None:
            slot.swap_out()
        found = self._swapped(id, access)
        return found is not None and self._store.store(found)

    def erase(self, id: str, access: Access) -> bool:
        """Forget a conversation, its file too; False if it is not known."""
        waited = self._behind.drop(id, access)
        slot = self._slot_of(id, access)
        if slot is not None:
            self.erase_running(access, slot)
            return True
        found = self._swapped(id, access)
        if found is not None:
            self._store.erase(found)
        return waited or found is not None

    def pin(self, id: str, lo: int, hi: int, access: Access) -> bool:
        """Keep tokens of the conversation at hand on the device; False if it is another."""
        slot = self._slot_of(id, access)
        if slot is None:
            return False
        slot.model.pin(lo, hi)
        return True

    def erase_running(self, access: Access, slot: Slot) -> int:
        """Forget the text in a slot; how many tokens it had. ConversationBusy. KVFlashError, and it stays."""
        mine = slot.conversation
        if not self._may(access, slot):
            return 0
        count = len(slot.model.tokens)
        if mine is not None:
            self._store.delete_file(mine)
        slot.clear()
        return count

    def save_running(self, name: str, access: Access, slot: Slot) -> tuple[int, int] | None:
        """Write the text in a slot to the folder's file of this name; how many tokens and bytes, None without a text.

        ConfigError for a name that is none. ConversationBusy.
        """
        assert self._folder is not None
        if not self._may(access, slot):
            return None
        path = self._folder.named(name, "" if slot.conversation is None else slot.conversation.salt)
        swapped = slot.model.swap_out()
        try:
            slot.model.write(swapped, path, sync=True)
            return len(swapped.tokens), path.stat().st_size
        finally:
            swapped.release()

    def load_running(self, name: str, access: Access, slot: Slot) -> int | None:
        """Put a file's text in a slot, whose own is swapped out; how many tokens it has, None if there is no such file.

        ConfigError for a name that is none. ConversationBusy.
        """
        assert self._folder is not None
        found = self._folder.find(name, access.may)
        if found is None:
            return None
        path, salt = found
        _check_free(slot)
        swapped = slot.model.read(path)
        try:
            slot.load(swapped, salt)
            return len(swapped.tokens)
        finally:
            swapped.release()

    def _may(self, access: Access, slot: Slot) -> bool:
        """Tell whether this access may use the text in a slot. The owner of the server always may. ConversationBusy."""
        mine = slot.conversation
        allowed = not access.owner if mine is None else access.may(mine.salt)
        if allowed:
            _check_free(slot)
        return allowed

    def _slot_of(self, id: str, access: Access) -> Slot | None:
        """Return the slot that holds a conversation. ConversationBusy while its answer is being made."""
        for slot in self._slots:
            mine = slot.conversation
            if mine is not None and mine.id == id and access.may(mine.salt):
                _check_free(slot)
                return slot
        return None

    def _swapped(self, id: str, access: Access) -> Conversation | None:
        return next((one for one in self._store if one.id == id and access.may(one.salt)), None)


def _check_free(slot: Slot) -> None:
    if slot.request is not None:
        raise ConversationBusy("an answer is being made in this conversation: ask again when it has ended")
