"""What can be done with conversations between two requests. Everything here runs on the engine's thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .folder import Folder
from .model import Model
from .seat import Seat
from .shelf import Conversation, Shelf


class ConversationControl:
    """The part of a scheduler that keeps conversations. Use it by `call`."""

    model: Model
    seat: Seat
    shelf: Shelf
    folder: Folder | None

    def conversations(self) -> list[dict[str, Any]]:
        """All that are known, the one used last at the end. No text."""
        seated = self.seat.conversation
        known = [*self.shelf, *([seated] if seated is not None else [])]
        return [self._describe(conversation) for conversation in known]

    def _describe(self, one: Conversation) -> dict[str, Any]:
        here = one is self.seat.conversation
        return {
            "id": one.id,
            "tokens": len(self.model.tokens) if here else len(one.tokens),
            "prompt": one.prompt,
            "where": "device" if here else one.where,
            "file": None if one.stored is None else one.stored.path.name,
        }

    def park(self, id: str) -> bool:
        """Put a conversation aside; False if it is not known."""
        if self._seated(id):
            self.seat.park()
            return True
        return self.shelf.get(id) is not None

    def save(self, id: str) -> bool:
        """Write a conversation to the folder; False if it is not known, or cannot be written."""
        if self._seated(id):
            self.seat.park()
        found = self.shelf.get(id)
        return found is not None and self.shelf.store(found)

    def erase(self, id: str) -> bool:
        """Forget a conversation, its file too; False if it is not known."""
        if self._seated(id):
            self.erase_seated()
            return True
        found = self.shelf.get(id)
        if found is not None:
            self.shelf.erase(found)
        return found is not None

    def pin(self, id: str, lo: int, hi: int) -> bool:
        """Keep tokens of the conversation at hand on the device; False if it is another."""
        if not self._seated(id):
            return False
        self.model.pin(lo, hi)
        return True

    def erase_seated(self) -> int:
        """Forget the text at hand; how many tokens it had."""
        count, mine = len(self.model.tokens), self.seat.conversation
        self.seat.clear()
        if mine is not None and mine.stored is not None:
            mine.stored.delete()
        return count

    def save_seated(self, path: Path) -> tuple[int, int]:
        """Write the text at hand to a file; how many tokens and bytes."""
        parked = self.model.park()
        try:
            self.model.write(parked, path, sync=True)
            return len(parked.tokens), path.stat().st_size
        finally:
            parked.release()

    def load_seated(self, path: Path) -> int:
        """Put a file's text in place of the one at hand, which is put aside; how many tokens it has."""
        parked = self.model.read(path)
        try:
            self.seat.load(parked)
            return len(parked.tokens)
        finally:
            parked.release()

    def _seated(self, id: str) -> bool:
        return self.seat.conversation is not None and self.seat.conversation.id == id
