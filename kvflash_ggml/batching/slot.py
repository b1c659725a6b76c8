"""Whose text is at hand: a request takes a slot with the text that saves most of its prompt."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..arrays import Int32s, common_prefix
from ..constants import CHUNK
from ..errors import HostMemoryError, KVFlashError, NotFinite
from ..sequence.prefill import QUESTION_TOKENS
from ..store.swapped import Conversation, SharedStore, SwappedText, SwapStore
from .messages import Access, Request, Usage
from .model import ServedText

logger = logging.getLogger("kvflash_ggml")

MIN_BEGINNING = 256
"""Tokens from which another conversation's beginning is worth going on from: fewer are read sooner than restored."""


def branch_of(model: ServedText, request: Request, known: Callable[[], int] = lambda: 0) -> int | None:
    """Tell where in a prompt to keep the state, for a model that cannot go back to anywhere.

    Where it leaves texts that are known, or will leave others, if it cannot go on from there; else where its question
    begins, so that another answer to it does not need all of it. known: how much of it other texts begin with.
    """
    if not model.stateful or not request.reuse:
        return None
    length, usable = len(request.tokens), model.usable(request.tokens)
    for place in (min(known(), length - 1), request.shared_until):
        if place - usable >= MIN_BEGINNING:
            return place
    return length - QUESTION_TOKENS if length - usable > 2 * QUESTION_TOKENS else None


@dataclass(slots=True)
class SlotCounts:
    """How often a text was put aside, brought back, gone on from by another, and could not be brought back."""

    swapped_out: int = 0
    resumes: int = 0
    forks: int = 0
    lost: int = 0


class Slot:
    """Holds one text of a model. counts: of all slots. clock: seconds, for what was used when. Used on one thread.

    request: whose answer is being made; None where the slot is free. used: when it was last taken.
    """

    def __init__(self, model: ServedText, store: SwapStore, counts: SlotCounts, clock: Callable[[], float]) -> None:
        self.model = model
        self._store = store
        self._clock = clock
        self._private = False  # the text at hand is not to be gone on from
        self.conversation: Conversation | None = None
        self.request: Request | None = None
        self.used = 0.0
        self.counts = counts

    def gain(self, request: Request) -> int:
        """Count the tokens of a prompt that the text at hand saves; 0 if it is another one's."""
        live, goes_on = self._live(request)
        return live if goes_on or live >= MIN_BEGINNING else 0

    def will_gain(self, request: Request, cached: int | None = None) -> bool:
        """Return whether another prompt should wait for the one that is to be read here, and begin with its copy.

        cached: how many of its tokens need not be read anyway; None for those that the text at hand has.
        """
        mine = self.request
        if mine is None or mine.salt != request.salt or not (mine.reuse and request.reuse):
            return False
        cached = self.gain(request) if cached is None else cached
        shared = common_prefix(mine.tokens, request.tokens)
        return shared >= cached + CHUNK and (shared >= MIN_BEGINNING or shared == len(mine.tokens))

    def _live(self, request: Request) -> tuple[int, bool]:
        """Tell how much of a prompt the text at hand saves, and whether the prompt is its continuation."""
        mine, tokens = self.conversation, request.tokens
        if mine is None or mine.salt != request.salt or self._private or not request.reuse:
            return 0, False
        shared = common_prefix(self.model.tokens, tokens)
        goes_on = not mine.stale and _goes_on(shared, mine.prompt, len(self.model.tokens))
        return self.model.usable(tokens), goes_on

    def take(self, request: Request, *, drawn: Sequence[int] = (), beside: Sequence[Slot] = ()) -> Conversation:
        """Bring the text to hand that a request goes on from; another one there is swapped out.

        drawn: what there is of its answer already, if that was put aside. beside: slots whose answers are being made,
        and whose texts can be copied.
        """
        if drawn:
            return self._take_again(request, drawn)
        if not request.reuse:
            return self._begin(request, private=True)
        tokens, mine, now = request.tokens, self.conversation, self._clock()
        live, goes_on = self._live(request)
        found, length = self._store.find(tokens, salt=request.salt, name=request.conversation)
        source = max(beside, key=lambda slot: slot.gain(request), default=None)
        if source is not None and source.gain(request) >= max(live, length) + CHUNK:
            return self._copy(source, request) or self.take(request)
        if (
            found is not None
            and length > live
            and (length >= max(MIN_BEGINNING, live + CHUNK) or (not goes_on and _continues(request, found)))
        ):
            taken = self._resume(found, length, request)
            if taken is not None:
                return taken
            return self.take(request)  # what is lost is off the shelf
        if mine is None or live == 0 or (live < MIN_BEGINNING and not goes_on):
            return self._begin(request)
        if not goes_on:
            self._swap_out()
            self.model.unpin()
            self.counts.forks += 1
            mine = self.conversation = _named(request)
        mine.name, mine.used = request.conversation or mine.name, now
        mine.prompt = len(tokens)
        return mine

    def _copy(self, source: Slot, request: Request) -> Conversation | None:
        """Put a copy of the text in another slot in place of the one at hand; None if that fails: it is read then."""
        copy = None
        try:
            copy = source.model.swap_out()
            self._swap_out()
            self.model.swap_in(copy)
        except KVFlashError as err:
            logger.warning("a beginning that another answer has is read again: %s", err)
            if copy is not None:
                self.clear()
            return None
        finally:
            if copy is not None:
                copy.release()
        self.model.unpin()
        self.counts.forks += 1
        self.conversation, self._private = _named(request), False
        return self.conversation

    def _take_again(self, request: Request, drawn: Sequence[int]) -> Conversation:
        """Bring the text back whose answer was interrupted after the tokens `drawn`. One that was lost is prefilled."""
        whole = replace(request, tokens=np.concatenate([request.tokens, np.asarray(drawn, np.int32)]))
        salt = request.salt if request.reuse else private_salt(request)
        own, length = self._store.find(whole.tokens, salt=salt, name=request.conversation)
        again = None
        if own is not None and length == len(whole.tokens) - 1:  # not the text at hand, however like it is
            again = self._resume(own, length, whole)
        if again is None:
            again = self.take(whole)
        else:
            again.salt, self._private = request.salt, not request.reuse
        again.prompt = len(request.tokens)
        return again

    def differs(self, request: Request) -> int | None:
        """Find the token at which a prompt leaves the text that has most of it; None if it goes on from all of that.

        A text that shares less than a chunk is another one. Call it before `take`.
        """
        mine, tokens = self.conversation, request.tokens
        texts = [(0, 0)]
        if mine is not None and mine.salt == request.salt and not self._private:
            texts.append((common_prefix(self.model.tokens, tokens), len(self.model.tokens)))
        shared, length = max(*texts, self._store.nearest(tokens, salt=request.salt))
        return shared if request.reuse and CHUNK <= shared < min(length, len(tokens) - 1) else None

    def preview(self, request: Request) -> Int32s | None:
        """Return the tokens that a preview of a request reads; None where the prompt is to be read as usual."""
        _, length = self._store.find(request.tokens, salt=request.salt, name=request.conversation)
        cached = max(self._live(request)[0], length) if request.reuse else 0
        return self.model.preview(request, cached)

    def continues(self, request: Request) -> str:
        """Return the identifier of the conversation that a prompt continues; "" for none."""
        if self._live(request)[1] and self.conversation is not None:
            return self.conversation.id
        found, _ = self._store.find(request.tokens, salt=request.salt, name=request.conversation)
        if found is None or not request.reuse:
            return ""
        return found.id if _continues(request, found) else ""

    def branch(self, request: Request) -> int | None:
        """See `branch_of`, among the texts that were put aside."""
        return branch_of(self.model, request, lambda: self._store.nearest(request.tokens, salt=request.salt)[0])

    def settle(self) -> None:
        """Forget a private text, after its answer."""
        if self._private:
            self.clear()

    def offer(self, store: SharedStore, usage: Usage, *, least: int = 0) -> None:
        """Have the text at hand written to the store that servers share, behind what comes next; it stays at hand.

        usage: of its answer. least: prompt tokens that had to be read for this to be worth it.
        """
        read = usage.prompt - usage.cached
        if self.conversation is None or self._private or len(self.model.tokens) < CHUNK or read < least:
            return
        if read >= CHUNK and usage.prompt_s > 0:
            store.read_rate = read / usage.prompt_s
        try:
            store.offer(self.conversation, self.model.swap_out())
        except HostMemoryError as err:
            logger.warning("a conversation is not written behind its answer: %s", err)

    def clear(self) -> None:
        """Forget the text at hand."""
        self.conversation, self._private = None, False
        self.model.reset()

    def lose(self, request: Request) -> None:
        """Forget the spoiled text of a request, and what it may have gone on from."""
        self.counts.lost += 1
        if self.conversation is not None:
            self._store.spoil(self.conversation)
        self.clear()
        found, _ = self._store.find(request.tokens, salt=request.salt, name=request.conversation)
        if found is not None:
            self._store.lose(found)

    def swap_out(self) -> None:
        """Swap the text at hand out."""
        self._swap_out()
        self.clear()

    def put_aside(self, request: Request) -> None:
        """Swap out the text of a request whose answer goes on later. Nobody else continues it if it is private."""
        self.interrupt()
        if self._private and self.conversation is not None:
            self.conversation.salt, self._private = private_salt(request), False
        self.swap_out()

    def interrupt(self) -> None:
        """Take what there is of an answer, or of its prompt, for a prompt: another answer to that leaves it alone."""
        if self.conversation is not None:
            self.conversation.prompt = len(self.model.tokens)

    def load(self, swapped: SwappedText, salt: str) -> None:
        """Go on from a text of this salt that was read from a file; the one at hand is swapped out.

        KVFlashError, and the slot is empty.
        """
        self._swap_out()
        try:
            self.model.swap_in(swapped)
        except BaseException:
            self.clear()
            raise
        self.conversation = Conversation(salt=salt, tokens=swapped.tokens.copy(), prompt=len(swapped.tokens))
        self._private = False

    def _begin(self, request: Request, *, private: bool = False) -> Conversation:
        self._swap_out()
        self.model.reset()
        self.conversation, self._private = _named(request), private
        return self.conversation

    def _swap_out(self) -> None:
        """Put the text at hand on the shelf. Where there is no room at all, or its values are not finite, it is let go
        of, and read again later.
        """
        mine, self.conversation = self.conversation, None  # first: other threads go by it whose the text is
        if mine is None or self._private or not len(self.model.tokens):
            return
        while True:
            try:
                swapped = self.model.swap_out()
                break
            except (HostMemoryError, NotFinite) as err:
                if isinstance(err, NotFinite) or not self._store.evict(held=True):
                    self.counts.lost += 1
                    logger.warning("a conversation of %d tokens is let go of: %s", len(self.model.tokens), err)
                    return
        self._store.put(mine, swapped, self._clock())
        self.counts.swapped_out += 1

    def _resume(self, found: Conversation, length: int, request: Request) -> Conversation | None:
        """Bring a swapped-out text to hand for a request. None if it is lost, and off the shelf then."""
        with self._store.holding(found):
            self._swap_out()
            goes_on = _continues(request, found)
            if found not in self._store or not self._bring(found):  # it had to go, or cannot come back
                return None
            self.counts.resumes += 1
            if goes_on:
                self._store.take(found)
            else:
                self.counts.forks += 1
                self.model.unpin()
                found.used = self._clock()
                self._store.touch(found)
                found = _named(request)
        found.name, found.prompt, found.used = request.conversation or found.name, len(request.tokens), self._clock()
        self.conversation, self._private = found, False
        return found

    def _bring(self, found: Conversation) -> bool:
        """Put a conversation in place of the text at hand; False if it is lost."""
        kept, swapped = found.swapped, None
        try:
            swapped = self._store.open(found)
            self.model.swap_in(swapped)
        except KVFlashError as err:
            self.counts.lost += 1
            logger.warning("a conversation of %d tokens is read again: %s", len(found.tokens), err)
            self._store.lose(found)
            self.clear()
            return False
        finally:
            if swapped is not None and swapped is not kept:
                swapped.release()
        return True


def private_salt(request: Request) -> str:
    """Return the salt of a swapped-out text that no request but this one may continue."""
    return Access.of(request.id).owner


def _goes_on(shared: int, prompt: int, length: int) -> bool:
    """Tell whether a request that shares so much with a text of this length is its continuation.

    One that has all of the last prompt is, whatever it makes of the answer; so is one that has all there is of a text.
    """
    return shared > 0 and (shared >= prompt or shared == length)


def _continues(request: Request, found: Conversation) -> bool:
    """Tell whether a request is the continuation of a swapped-out text."""
    return _goes_on(common_prefix(found.tokens, request.tokens), found.prompt, len(found.tokens))


def _named(request: Request) -> Conversation:
    return Conversation(name=request.conversation, salt=request.salt, tokens=request.tokens, prompt=len(request.tokens))
