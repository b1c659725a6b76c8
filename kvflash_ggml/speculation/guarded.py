"""A drafter behind a guard: what it knows of the text, and calls that switch it off where they fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from ..arrays import Floats, Int32s
from ..errors import DraftError, NotFinite, SnapshotError
from ..state.session import SavedDraft
from .base import Drafter, FeatureRows, Remembering, Sometimes
from .draft import Draft, checked

logger = logging.getLogger("kvflash_ggml")

MAX_BAD = 3
"""Unverifiable drafts in a row after which a drafter is not asked any more; the same number of failed steps."""

IDLE_STEPS = 64
"""Steps without a draft after which a drafter that was not asked gets no more of the target's rows: to read these takes
time at each step.
"""

AGAIN = 8
"""How many of these steps are left after a prompt: every drafter gets the rows of a prompt."""

WARM = 32
"""Tokens whose rows a drafter must get, after a pause, before it is asked again."""

MAX_KEPT = 1 << 30
"""Bytes of the states that a lone drafter keeps for texts that it has left, at most; the oldest go first. With a window
of 4,096 tokens a state of a 0.6B model has 470 MB.
"""


@dataclass(slots=True, eq=False)
class GuardedDrafter:
    """A drafter and its bookkeeping. Several speculators may ask it, each for a text of its own.

    lone: it drafts only for a text that is decoded alone, and follows the text of one speculator at a time. room: bytes
    that its states for other texts may take now. observed: tokens of the text that it has observed. read: length of the
    text when it was asked last. bad: unverifiable drafts in a row. why: the reason, once it is not asked any more.
    deciding: seconds that the last decision about its draft took. idle_steps: steps without a draft since it was asked.
    missing: tokens whose rows it must get before it is asked.
    """

    drafter: Drafter
    lone: bool = False
    room: Callable[[], int] = field(default=lambda: MAX_KEPT)
    observed: int = 0
    read: int = 0
    bad: int = 0
    why: str = ""
    deciding: float = 0.0
    idle_steps: int = 0
    missing: int = 0
    _text: ReferenceType[object] | None = None  # the speculator whose text a lone one follows
    _closed: bool = False
    _kept: WeakKeyDictionary[object, SavedDraft] = field(default_factory=WeakKeyDictionary)  # states for other texts
    _sometimes: Sometimes | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._sometimes = self.drafter if isinstance(self.drafter, Sometimes) else None

    @property
    def name(self) -> str:
        return self.drafter.name

    @property
    def failed(self) -> bool:
        return self.bad >= MAX_BAD

    @property
    def able(self) -> bool:
        """Whether it may have something to propose."""
        return not self.failed and (self._sometimes is None or self._sometimes.able)

    @property
    def gets_rows(self) -> bool:
        """Whether it gets the target's rows of each step, if it wants any."""
        return not self.failed and self.idle_steps <= IDLE_STEPS

    def wants_step(self, count: int, *, ahead: bool) -> bool:
        """Count a step of `count` tokens. Returns whether the drafter gets the target's rows of these tokens."""
        if count == 1:
            self.idle_steps += 1
        elif not ahead:
            self.idle_steps = min(self.idle_steps, IDLE_STEPS - AGAIN)
        if not self.gets_rows:
            self.missing = WARM
        return self.gets_rows and bool(self.drafter.wants)

    def follows(self, text: object) -> bool:
        """Return whether it is at the end of this text."""
        return not self.lone or (self._text is not None and self._text() is text)

    def unread(self, length: int) -> int:
        """Return how many tokens of a text of `length` it reads before it drafts."""
        if self.missing and self.drafter.wants:
            return self.missing  # it reads nothing before these
        newest = self.drafter.wants.newest
        return length - self.read if newest is None else min(newest, length - self.read)

    # --- calls of the drafter

    def observe(self, start: int, tokens: Int32s, rows: tuple[FeatureRows, Floats] | None) -> None:
        """Let it observe tokens of the text from `start` on: each once, in order. rows: of the target, for all."""
        if rows is not None:
            if start > self.observed:  # it knows a text whose rows from here on it did not get
                self.read, self.missing = start, WARM if self.observed else self.missing
            self.missing = max(0, self.missing - len(tokens))
        self.observed = start + len(tokens)
        own = None if rows is None else rows[0].of(self.drafter.wants, rows[1])
        self._call(self.drafter.observe, start, tokens, own)

    def truncate(self, text: object, length: int) -> None:
        """Note that a text was cut to `length` tokens."""
        if self.follows(text):
            if self.observed > length:
                self.observed, self.read = length, min(self.read, length)
                self._call(self.drafter.truncate, length)
        elif text in self._kept and self._kept[text].length > length:
            del self._kept[text]

    def propose(self, root: int, limit: int, *, n_vocab: int, ends: Collection[int]) -> Draft | None:
        """Return a draft of at most `limit` tokens that can be verified; None for nothing.

        DraftError if the proposal cannot be verified, or its values are not finite. After MAX_BAD in a row, or another
        error, it is not asked again.
        """
        try:
            proposed = self.drafter.propose(root, limit)
            if proposed is None:
                return None
            if not isinstance(proposed, Draft):
                raise DraftError(f"{self.name}: {proposed!r:.100} is no draft")
            draft = checked(replace(proposed, source=self.name), n_vocab=n_vocab, max_tokens=limit, ends=ends)
        except (DraftError, NotFinite) as err:  # values that are not finite are of this text, and others follow
            self.bad += 1
            if self.failed:
                self._disable(str(err))
            raise DraftError(str(err)) from err
        except Exception as err:  # a drafter may be anybody's code, and the text does not depend on it
            self._disable(f"{type(err).__name__}: {err}")
            raise DraftError(self.why) from err
        self.bad = 0
        return draft

    def close(self) -> None:
        """Close a drafter that is not asked any more."""
        if not self._closed:
            self._closed = True
            try:
                self.drafter.close()
            except Exception as err:
                logger.info("%s could not be closed: %s", self.name, err)

    # --- its state: of a text that is swapped out, and of a text that it leaves for another

    def attach(self, text: object) -> None:
        """Follow this text, unless it follows another one already."""
        self._text = self._text or ref(text)

    def move_to(self, text: object) -> None:
        """Draft for this text from now on: go on where it left it, or know nothing of it.

        A drafter without that state could not get the target's rows of the text again, and would read its tokens again.
        """
        if self.follows(text):
            return
        left, leaves, saved = self._text and self._text(), self._state(), self._kept.pop(text, None)
        self._text = ref(text)
        if left is not None:
            self._keep(left, leaves)
        self._call(self.drafter.truncate, 0)
        self.observed = self.read = self.idle_steps = 0
        self.missing = WARM
        if saved is not None:
            self._take(saved)

    def state(self, text: object) -> SavedDraft | None:
        """Return its state for a text; None if there is none."""
        return self._state() if self.follows(text) else self._kept.get(text)

    def _keep(self, text: object, saved: SavedDraft | None) -> None:
        """Keep a state for a text in place of the one before."""
        self._kept.pop(text, None)
        most = min(MAX_KEPT, self.room())
        if saved is None or saved.size > most:
            return
        for oldest in list(self._kept):
            if sum(one.size for one in self._kept.values()) + saved.size > most:
                del self._kept[oldest]
        self._kept[text] = saved

    def _state(self) -> SavedDraft | None:
        if not (isinstance(self.drafter, Remembering) and self.observed and self.gets_rows):
            return None
        try:
            return self.drafter.state()
        except Exception as err:
            logger.warning("the state of %s is not saved: %s", self.name, err)
            return None

    def load(self, text: object, saved: Sequence[SavedDraft], length: int) -> None:
        """Take over the saved state of its kind, for a text of `length`. It knows nothing if there is none."""
        own = next((one for one in saved if one.origin.name == self.name), None)
        if not self.follows(text):
            self._keep(text, own)
            return
        self.observed = length  # after an interrupt the text is cut to nothing
        if saved and isinstance(self.drafter, Remembering):
            self._take(own)
        else:
            self.observed = self.read = 0
        self.missing = 0

    def _take(self, saved: SavedDraft | None) -> None:
        """Take over a state. The drafter proposes once, as a test: a file may hold anything."""
        try:
            if saved is None:
                raise SnapshotError("it did not draft when the text was saved")
            assert isinstance(self.drafter, Remembering)
            self.drafter.load(saved)
            self.drafter.propose(0, 1)
            self.observed = self.read = saved.length
            self.missing = 0
        except Exception as err:
            logger.warning("%s starts anew behind the restored text: %s", self.name, err)
            self.observed = self.read = 0
            self._call(self.drafter.truncate, 0)

    def _call(self, method: Callable[..., None], *arguments: Any) -> None:
        """Call a drafter's method. If it raises, the drafter is switched off and the text goes on."""
        if not self.failed:
            try:
                method(*arguments)
            except Exception as err:
                self._disable(f"{type(err).__name__}: {err}")

    def _disable(self, why: str) -> None:
        self.bad, self.why = MAX_BAD, why
        logger.warning("%s does not draft any more: %s", self.name, why)
