"""Conversations of a server that shares a store: it writes them behind each answer, and takes over those of others."""

from __future__ import annotations

import logging
import math
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvflash_ggml.arrays import Int32s, common_prefix
from kvflash_ggml.constants import CHUNK
from kvflash_ggml.errors import KVFlashError, SnapshotError
from kvflash_ggml.store.swapped import Conversation, SharedStore, SwappedText
from kvflash_ggml.store.texts import new_id, usable

from .scratch import ScratchFolder
from .shared import Draft, Head, SharedTexts, begin_of

logger = logging.getLogger("kvflash_ggml")

READERS = 8
"""Searches at once: a long transfer, or waiting for another server, does not hold up the others."""

REST_S = 10.0
"""Seconds in which a store is not written after a write has failed, and not searched after a search has failed."""

PATIENCE_S = 30.0
"""Seconds that a request waits for the store until the reading rate of prompts is known."""

LEAST_S = 1.0
"""Seconds that a request waits at least, even if its prompt is read sooner: a text of the store goes on bitwise."""

WRITE, SEARCH = "write", "search"

TRY_AGAIN = 1.25
"""Factor on the rate of a store that was too slow. Without it the server would never try the store again."""


@dataclass(frozen=True, slots=True)
class _Found:
    """The result of a search: ids that are no longer in the store, and the fetched text in a file."""

    gone: Collection[str]
    head: Head | None = None
    path: Path | None = None


class SharedSwapStore(SharedStore):
    """A `SwapStore` that shares conversations with other servers. Its own are in memory.

    One thread uses it; others read and write the store. at_hand: the conversations in slots. wake: called on another
    thread when something was written or found. clock: seconds. more: see `SwapStore`; there is no folder.
    """

    def __init__(
        self,
        shared: SharedTexts,
        *,
        at_hand: Callable[[], Iterable[Conversation]],
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        **more: Any,
    ) -> None:
        super().__init__(**more)
        self._shared = shared
        self._at_hand = at_hand
        self._wake = wake
        self._clock = clock
        self._scratch = ScratchFolder("kvflash-store-")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kvflash-store")
        self._reader = ThreadPoolExecutor(READERS, thread_name_prefix="kvflash-takeover")
        self._announcer = ThreadPoolExecutor(1, thread_name_prefix="kvflash-announcer")  # one: in order
        self._writing: dict[Conversation, tuple[Future[Head], SwappedText, Draft]] = {}
        self._next: dict[Conversation, SwappedText] = {}
        self._searches: dict[tuple[str, bytes], tuple[Int32s, Future[_Found]]] = {}
        self._refused = set[str]()  # heads that cannot be used
        self._erased: dict[str, int] = {}  # up to which number, of conversations that were erased here
        self._rests: dict[str, float] = {}  # until when, by what has failed: WRITE or SEARCH

    # --- writing

    def offer(self, conversation: Conversation, swapped: SwappedText) -> None:
        """Write a conversation behind what the server does next. It holds `swapped` from here on.

        If the store fails, it is written when the store works again, unless room is needed before.
        """
        self._unqueue(conversation)
        self._next[conversation] = swapped
        if conversation in self._writing and not self._resting(WRITE):
            draft = self._writing[conversation][2]
            # a search that comes when that is written waits for this one
            self._announcer.submit(
                self._shared.announce, draft.id, draft.number + 1, swapped.tokens.copy(), conversation.salt
            )
        self._write_next()

    def _write_next(self) -> None:
        """Begin the writes that are due. A store that has failed is tried with one of them."""
        for conversation in [one for one in self._next if one not in self._writing]:
            if self._resting(WRITE) or (WRITE in self._rests and self._writing):
                return
            swapped = self._next.pop(conversation)
            draft = self._draft(conversation, swapped)
            future = self._writer.submit(self._publish, draft, swapped)
            self._writing[conversation] = future, swapped, draft
            future.add_done_callback(lambda _: self._wake())

    def _unqueue(self, conversation: Conversation) -> None:
        """Forget a state that is not being written yet."""
        swapped = self._next.pop(conversation, None)
        if swapped is not None:
            swapped.release()

    def _draft(self, conversation: Conversation, swapped: SwappedText) -> Draft:
        base = conversation.head
        return Draft(
            id=base.id if base is not None else new_id() if conversation.stale else conversation.id,
            salt=conversation.salt, prompt=min(conversation.prompt, len(swapped.tokens)), places=swapped.places,
            tokens=swapped.tokens.copy(), base=base,
        )  # fmt: skip

    def _publish(self, draft: Draft, swapped: SwappedText) -> Head:
        path = self._new_path()
        try:
            with self._shared.announced(draft):
                self._write(swapped, path, sync=False)
                return self._shared.publish(draft, path)
        finally:
            path.unlink(missing_ok=True)

    def _finish(self, conversation: Conversation) -> None:
        """Wait until a conversation is written as it was offered last, unless the store fails."""
        self._write_next()
        while conversation in self._writing or (conversation in self._next and self._writing):
            self._settle(conversation if conversation in self._writing else next(iter(self._writing)))

    def _settle(self, conversation: Conversation) -> None:
        """Wait for the write that is under way, and begin the next one."""
        future, swapped, draft = self._writing[conversation]
        done = self._note(conversation, future)
        del self._writing[conversation]
        if not done or conversation not in self._next or future.result().id != draft.id:
            self._announcer.submit(self._shared.withdraw, draft.id)  # no write of the announced name follows
        if done or conversation in self._next or not isinstance(future.exception(), OSError):
            swapped.release()
        else:
            self._next[conversation] = swapped
        self._write_next()

    def _note(self, conversation: Conversation, future: Future[Head]) -> bool:
        """Wait until a state is written, and note what became of it; False if it could not be."""
        try:
            head = future.result()
        except Exception as err:  # whatever a store does, the engine's thread goes on
            self.counts.failed += 1
            self._failed(WRITE, err)
            return False
        before, conversation.head = conversation.head, head
        if conversation.stale or (before is not None and before.id != head.id):
            self.counts.copied += 1
            logger.info("%s has gone on elsewhere: this server goes on with a copy", conversation.id)
        conversation.stale = False
        self._rests.pop(WRITE, None)
        self.counts.written += 1
        return True

    def _is_written(self, conversation: Conversation) -> bool:
        swapped, head = conversation.swapped, conversation.head
        return swapped is not None and head is not None and np.array_equal(head.tokens, swapped.tokens)

    def store(self, conversation: Conversation, *, sync: bool = True) -> bool:
        self._finish(conversation)
        swapped = conversation.swapped
        if swapped is None or self._is_written(conversation):
            return swapped is not None
        if self._resting(WRITE) or len(swapped.tokens) < CHUNK:
            return False  # sooner read than fetched
        self._unqueue(conversation)  # it is no newer
        draft = self._draft(conversation, swapped)
        return self._note(conversation, self._writer.submit(self._publish, draft, swapped))

    def _resting(self, what: str) -> bool:
        return self._clock() < self._rests.get(what, -math.inf)

    def _failed(self, what: str, error: BaseException) -> None:
        """Leave the store alone for a while, and warn once until it works again."""
        if not self._rests:
            logger.warning("the store cannot be used, texts stay here until it can: %s", error)
        self._rests[what] = self._clock() + REST_S

    # --- taking over

    def search(self, tokens: Int32s, *, salt: str, cached: int) -> Callable[[], bool] | None:
        """Look, on another thread, for a conversation that saves more than `cached` tokens of a prompt, and fetch it.

        Returns whether to wait: while that is under way, and not longer than reading would take. None for no search.
        """
        if len(tokens) <= CHUNK or self._resting(SEARCH):
            return None
        key = salt, tokens.tobytes()
        if key not in self._searches:
            numbers = dict[str, float]()
            for one in [*self._at_hand(), *self.alike(tokens, salt=salt)]:
                id = one.id if one.head is None else one.head.id
                busy = one in self._writing
                numbers[id] = float("inf") if busy else 0 if one.head is None else one.head.number
            future = self._reader.submit(self._seek, tokens, salt, cached, numbers)
            self._searches[key] = tokens, future
            future.add_done_callback(lambda _: self._wake())
        takes = PATIENCE_S if self.read_rate is None else (len(tokens) - cached) / self.read_rate
        until = self._clock() + max(LEAST_S, takes)
        return lambda: key in self._searches and self._clock() < until

    def _seek(self, tokens: Int32s, salt: str, cached: int, numbers: dict[str, float]) -> _Found:
        shared, refused = self._shared, self._refused
        head, ids = shared.search(tokens, salt=salt, cached=cached, numbers=numbers, refused=refused)
        gone = {id for id, number in numbers.items() if 0 < number < float("inf")} - set(ids)
        if gone:  # a listing may miss a state that is replaced meanwhile, and the next one too
            gone -= shared.latest(begin_of(tokens, salt)).keys()
        if head is None:
            return _Found(gone)
        if shared.rate is not None and self.read_rate is not None:
            reading = (usable(head.tokens, head.places, tokens) - cached) / self.read_rate
            if head.size / shared.rate > max(LEAST_S, reading):
                shared.rate *= TRY_AGAIN
                return _Found(gone)
        path = self._new_path()
        free = shutil.disk_usage(path.parent).free
        if head.size > free:
            refused.add(head.name)
            what = "%s of the store is left there: it is larger than the free %d MiB of %s"
            logger.warning(what, head.name, free >> 20, path.parent)
            return _Found(gone)
        try:
            shared.fetch(head, path)
        except BaseException as err:
            path.unlink(missing_ok=True)
            if not isinstance(err, SnapshotError):
                raise
            refused.add(head.name)
            logger.warning("a conversation of the store is left alone: %s", err)
            with suppress(OSError):
                shared.forget(head)  # whoever goes on with it writes all of its blocks again
            return _Found(gone)
        return _Found(gone, head, path)

    def collect(self) -> bool:
        """Use the results of writes and searches that have ended. Return whether a search has."""
        for conversation, (written, *_) in list(self._writing.items()):
            if written.done():
                self._settle(conversation)
        self._write_next()
        ended = False
        for key, (tokens, future) in list(self._searches.items()):
            if not future.done():
                continue
            ended = True
            del self._searches[key]
            try:
                found = future.result()
            except Exception as err:  # as in `_note`
                self._failed(SEARCH, err)
                continue
            self._rests.pop(SEARCH, None)
            self._forget_erased(tokens, key[0], found.gone)
            if found.head is not None and found.path is not None:
                self._take_over(found.head, found.path)
        return ended

    def _take_over(self, head: Head, path: Path) -> None:
        """Add a text of the store. path: its file, which is deleted."""
        try:
            swapped = self._read(path)
        except (KVFlashError, OSError) as err:
            self._refused.add(head.name)
            logger.warning("%s of the store is read again: %s", head.name, err)
            return
        finally:
            path.unlink(missing_ok=True)  # what was opened stays readable
        here = [*self._at_hand(), *self]
        mine = [one for one in here if one.head is not None and one.head.id == head.id]
        other = not np.array_equal(swapped.tokens, head.tokens)
        if (
            other
            or head.number <= self._erased.get(head.id, 0)
            or any(one.head is not None and one.head.number >= head.number for one in mine)
        ):
            swapped.release()
            if other:
                self._refused.add(head.name)
                logger.warning("%s of the store has another text than it says: it is left alone", head.name)
            return
        for one in mine:
            one.head, one.stale = None, True
            if one in self and _begins(one.tokens, head.tokens):
                self.drop(one)
        if head.made != self._shared.made:
            logger.info("a text of %s goes on, on %s: up to rounding", head.made or "?", self._shared.made or "?")
        id = new_id() if any(one.id == head.id for one in here) else head.id
        taken = Conversation(id=id, salt=head.salt, tokens=head.tokens, prompt=head.prompt, head=head)
        self._insert(taken, swapped, self._clock())  # without eviction: the request that waits for it comes next
        self.counts.taken += 1

    def put(self, conversation: Conversation, swapped: SwappedText, now: float) -> None:
        alike = self.alike(swapped.tokens, salt=conversation.salt)
        if conversation.stale and any(_begins(swapped.tokens, one.tokens) for one in alike if one is not conversation):
            swapped.release()  # this server has the continuation of another one
        else:
            super().put(conversation, swapped, now)

    # --- forgetting

    def evict(self, *, held: bool = False) -> bool:
        if super().evict(held=held):
            return True
        queued = next(iter(self._next), None)
        if queued is not None:
            self._unqueue(queued)
        return queued is not None

    def _first(self, able: list[Conversation]) -> Conversation:
        return next((one for one in able if self._is_written(one) and one is not self._held), able[0])

    def drop(self, conversation: Conversation) -> None:
        """Forget a conversation here; the store keeps it."""
        self._unqueue(conversation)
        self.remove(conversation)

    def spoil(self, conversation: Conversation) -> None:
        self._unqueue(conversation)
        if conversation.head is not None:
            self._refused.add(conversation.head.name)

    def delete_file(self, conversation: Conversation) -> None:
        """Erase a conversation from the store. KVFlashError if it is there still."""
        self._unqueue(conversation)
        self._finish(conversation)
        self._unqueue(conversation)  # if that write has failed
        head = conversation.head
        try:
            self._shared.undo()
            if head is not None:
                newest = self._shared.erase(head.begin, head.id)
                self._erased[head.id] = max(newest, head.number)  # a search may be fetching it
        except OSError as err:
            self._failed(WRITE, err)
            raise KVFlashError(f"{conversation.id} could not be erased from the store: {err}") from err
        conversation.head = None

    def _forget_erased(self, tokens: Int32s, salt: str, gone: Collection[str]) -> None:
        """Drop texts like `tokens` that a client has erased from the store."""
        for one in list(self.alike(tokens, salt=salt)):
            if self._is_written(one) and one.head is not None and one.head.id in gone and one is not self._held:
                self.drop(one)

    def close(self) -> None:
        for conversation in [*self._writing, *self._next]:
            self._finish(conversation)
        self._rests = dict.fromkeys(self._rests, -math.inf)  # it is the last chance
        super().close()
        for conversation in list(self._next):
            self._unqueue(conversation)
        self._announcer.shutdown(cancel_futures=True)
        self._shared.close()
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown()
        self._scratch.close()

    def _new_path(self) -> Path:
        return Path(self._scratch.path, f"{secrets.token_hex(8)}.kvs")


def _begins(beginning: Int32s, tokens: Int32s) -> bool:
    return common_prefix(beginning, tokens) == len(beginning)
