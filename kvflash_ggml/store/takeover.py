"""Conversations of a server that shares a store with others: written behind each answer, and taken over by any."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays import Int32s, common_prefix
from ..constants import CHUNK
from ..errors import KVFlashError, SnapshotError
from .shared import Draft, Head, SharedTexts, begin_of, head_name, new_id
from .swapped import Conversation, Stored, SwappedText, SwapStore

logger = logging.getLogger("kvflash_ggml")


class SharedSwapStore(SwapStore):
    """A `SwapStore` whose folder is a store that several servers share. One thread uses it; another one writes.

    write and read: of the model, by the path of a file in a folder of its own. at_hand: the conversations in slots.
    wake: called, on the writing thread, when something was written. more: `capacity` and `most`, see `SwapStore`.
    """

    def __init__(
        self,
        shared: SharedTexts,
        *,
        write: Callable[[SwappedText, Path], None],
        read: Callable[[Path], SwappedText],
        at_hand: Callable[[], Iterable[Conversation]],
        wake: Callable[[], None],
        **more: Any,
    ) -> None:
        super().__init__(write=lambda swapped, place, sync: write(swapped, place.path), read=self._fetch, **more)
        self._shared = shared
        self._to_file, self._from_file = write, read
        self._at_hand = at_hand
        self._wake = wake
        self._scratch = tempfile.TemporaryDirectory(prefix="kvflash-store-")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kvflash-store")
        self._writing: dict[Conversation, tuple[Future[Head], SwappedText]] = {}
        self._next: dict[Conversation, SwappedText] = {}
        self._refused = set[str]()
        self._failing = False
        self.read_rate: float | None = None
        """Tokens per second of prompts; None before the first."""

    # --- writing

    def offer(self, conversation: Conversation, swapped: SwappedText) -> None:
        """Write a conversation behind what the server does next. It holds `swapped` from here on."""
        if conversation in self._writing:
            before = self._next.pop(conversation, None)
            if before is not None:
                before.release()
            self._next[conversation] = swapped
        else:
            self._submit(conversation, swapped)

    def _submit(self, conversation: Conversation, swapped: SwappedText) -> None:
        base = None if conversation.stored is None else conversation.stored.head
        draft = Draft(
            id=conversation.id, salt=conversation.salt, prompt=min(conversation.prompt, len(swapped.tokens)),
            places=swapped.places, tokens=swapped.tokens.copy(), base=base,
        )  # fmt: skip
        future = self._writer.submit(self._publish, draft, swapped)
        self._writing[conversation] = future, swapped
        future.add_done_callback(lambda _: self._wake())

    def _publish(self, draft: Draft, swapped: SwappedText) -> Head:
        path = Path(self._scratch.name, f"out-{draft.id}.kvs")
        try:
            self._to_file(swapped, path)
            return self._shared.publish(draft, path)
        finally:
            path.unlink(missing_ok=True)

    def collect(self) -> None:
        """Take note of what has been written."""
        for conversation, (future, _) in list(self._writing.items()):
            if future.done():
                self._finish(conversation)

    def _finish(self, conversation: Conversation) -> None:
        """Wait until a conversation is written as it was offered last."""
        while conversation in self._writing:
            future, swapped = self._writing[conversation]
            error = future.exception()
            swapped.release()
            del self._writing[conversation]
            if error is None:
                self._written(conversation, future.result())
            elif isinstance(error, KVFlashError | OSError):
                self._failed(error)
            else:
                raise error
            if conversation in self._next:
                self._submit(conversation, self._next.pop(conversation))

    def _written(self, conversation: Conversation, head: Head) -> None:
        if conversation.stored is not None and conversation.id != head.id:
            self.counts.copied += 1
            logger.info("%s has gone on elsewhere: this server goes on with a copy, %s", conversation.id, head.id)
        self._failing = False
        self.counts.written += 1
        conversation.id, conversation.stored = head.id, _stored(head)
        conversation.stored.current = np.array_equal(head.tokens, conversation.tokens)

    def _failed(self, error: BaseException) -> None:
        self.counts.failed += 1
        if not self._failing:
            self._failing = True
            logger.warning("the store cannot be used, texts stay here until it can: %s", error)

    def add(self, conversation: Conversation) -> None:
        if conversation.stored is not None and conversation.stored.head is not None:
            conversation.stored.current = np.array_equal(conversation.stored.head.tokens, conversation.tokens)
        super().add(conversation)

    def store(self, conversation: Conversation, *, sync: bool = True) -> bool:
        self._finish(conversation)
        swapped, stored = conversation.swapped, conversation.stored
        if swapped is None or (stored is not None and stored.current):
            return stored is not None
        if len(swapped.tokens) < CHUNK:
            return False  # sooner read than fetched
        self._submit(conversation, _Borrowed(swapped))
        self._finish(conversation)
        return conversation.stored is not None and conversation.stored.current

    # --- taking over

    def find(self, tokens: Int32s, *, salt: str, name: str | None) -> tuple[Conversation | None, int]:
        self.collect()
        if len(tokens) > CHUNK:
            try:
                self._look(tokens, salt)
            except OSError as err:
                self._failed(err)
        return super().find(tokens, salt=salt, name=name)

    def saves(self, conversation: Conversation, length: int) -> bool:
        stored = conversation.stored
        if conversation.swapped is not None or stored is None or stored.head is None:
            return True
        fetched, read = self._shared.rate, self.read_rate
        return fetched is None or read is None or stored.head.size / fetched < length / read

    def _look(self, tokens: Int32s, salt: str) -> None:
        """Learn which conversations that begin as `tokens` do the store has. OSError."""
        begin = begin_of(tokens, salt)
        latest = self._shared.latest(begin)
        shelf = {one.id: one for one in self._texts.alike(tokens, salt=salt)}
        at_hand = {one.id: one for one in self._at_hand()}
        for id, number in latest.items():
            mine = at_hand.get(id) or shelf.get(id)
            if (
                (mine is not None and mine in self._writing)
                or _number(mine) >= number
                or head_name(begin, id, number) in self._refused
            ):
                continue
            try:
                head = self._shared.read(begin, id, number)
            except FileNotFoundError:  # it has just been replaced
                continue
            except SnapshotError as err:
                self._refused.add(head_name(begin, id, number))
                logger.warning("a conversation of the store is left alone: %s", err)
                continue
            if mine is not None:
                self._stale(mine, head)
            self.add(
                Conversation(id=head.id, salt=head.salt, tokens=head.tokens, prompt=head.prompt, stored=_stored(head))
            )
        for id, one in shelf.items():
            clean = one.stored is not None and one.stored.head is not None and one.stored.current
            if clean and id not in latest and one not in self._writing and one in self._texts:
                self.drop(one)  # erased by somebody, or older than what another server has of it

    def _stale(self, mine: Conversation, head: Head) -> None:
        """Another server has gone on with a conversation. What only this one has of it becomes a copy."""
        if mine in self._texts and common_prefix(mine.tokens, head.tokens) == len(mine.tokens):
            self.drop(mine)
        else:
            mine.id, mine.stale = new_id(), True

    def _fetch(self, place: Stored) -> SwappedText:
        if place.head is None:
            raise SnapshotError(f"{place.path} is not of this store")
        path = Path(self._scratch.name, "in.kvs")
        try:
            self._shared.fetch(place.head, path)
            swapped = self._from_file(path)
        except OSError as err:
            raise SnapshotError(f"{place.path} cannot be had from the store: {err}") from err
        finally:
            path.unlink(missing_ok=True)  # what was opened stays readable
        if not np.array_equal(swapped.tokens, place.head.tokens):
            swapped.release()
            raise SnapshotError(f"{place.path} has another text than its head says")
        place.places = swapped.places
        self.counts.taken += 1
        return swapped

    # --- forgetting

    def drop(self, conversation: Conversation) -> None:
        """Forget a conversation here; the store keeps it."""
        self._finish(conversation)
        conversation.stored = None
        super().erase(conversation)

    def lose(self, conversation: Conversation) -> None:
        if conversation.stored is not None and conversation.stored.head is not None:
            self._refused.add(conversation.stored.head.name)
        self.drop(conversation)

    def delete_file(self, conversation: Conversation) -> None:
        self._finish(conversation)
        stored, conversation.stored = conversation.stored, None
        if stored is not None and stored.head is not None:
            try:
                self._shared.erase(stored.head.begin, conversation.id)
            except OSError as err:
                self._failed(err)

    def close(self) -> None:
        for conversation in list(self._writing):
            self._finish(conversation)
        super().close()
        self._writer.shutdown()
        self._scratch.cleanup()


class _Borrowed:
    """A text that somebody else releases."""

    def __init__(self, swapped: SwappedText) -> None:
        self._swapped = swapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._swapped, name)

    def release(self) -> None:
        pass


def _number(conversation: Conversation | None) -> int:
    """Return which state of a conversation is known here; 0 for none."""
    stored = None if conversation is None else conversation.stored
    return 0 if stored is None or stored.head is None else stored.head.number


def _stored(head: Head) -> Stored:
    return Stored(path=Path(head.name), id=head.id, salt=head.salt, prompt=head.prompt, places=head.places, head=head)
