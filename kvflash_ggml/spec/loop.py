"""Between a text and its drafters: who is asked, how much of it is verified, and what came of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial

from ..arrays import Floats, Int32s
from ..errors import DraftError
from ..state.draft import SavedDraft
from . import remember, tree
from .base import Drafter
from .control import Controls
from .draft import Draft, checked
from .features import FeatureRows
from .tally import Tally

logger = logging.getLogger("kvflash_ggml")

MOST_BAD = 3
"""Drafts in a row that cannot be verified, after which a drafter is not asked any more."""


class Speculator:
    """Asks the drafters of one text in turn, and learns from what becomes of their drafts. It follows the text.

    controls: what is worth it. n_vocab: of the target. ends: tokens that end a text. features: what drafters are given
    of the target's compute; None if they want nothing. total, last: what came of it, in all and since `begin`. off: why
    nothing is drafted any more, None while something may be.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        controls: Controls,
        *,
        n_vocab: int,
        ends: Collection[int],
        features: FeatureRows | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.drafters = list(drafters)
        self.controls = controls
        self.total, self.last = Tally(), Tally()
        self.off: str | None = None
        self._n_vocab = n_vocab
        self._ends = frozenset(ends)
        self._features = features
        self._clock = clock
        self._known = [0] * len(self.drafters)
        self._bad = [0] * len(self.drafters)
        self._ahead: tuple[int, Int32s, Floats] | None = None
        self._running: float | None = None  # when the step that is timed began, or went on
        self._spent = 0.0
        self._draft_seconds = 0.0
        self._drafted: Draft | None = None

    @property
    def types(self) -> tuple[str, ...]:
        """The names of those that are asked."""
        return tuple(drafter.name for drafter in self.drafters)

    def begin(self, length: int) -> None:
        """A request begins, with a text of so many tokens."""
        self.last = Tally()
        self._running = None
        self.controls.begin(length)

    # --- one step

    def propose(self, text: Int32s, root: int, most: int, *, places: int = 0) -> Draft | None:
        """What may follow a text and then `root`, at most `most` tokens of it; None to go on without.

        places: positions that the rows of a tree can take; of one that does not fit, the main chain is verified.
        From here on the step is timed, until `plain` or `verified`.
        """
        self._remove_failed()
        self._spent = self._draft_seconds = 0.0
        self._running = self._clock()
        for at, drafter in enumerate(self.drafters):
            asked = min(most, self.controls.ask(drafter.name)) if most > 0 else 0
            if asked < 1:
                continue
            began = self._clock()
            draft = self._ask(at, drafter, text, root, asked)
            taken = self._clock() - began
            self._draft_seconds += taken
            self.controls.proposed(drafter.name, draft, taken)
            if draft is None or len(draft) == 0:
                continue
            rows = min(self.controls.choose(draft, self.types[at + 1 :]), most + 1)
            if rows > 1:
                draft = draft.first(rows - 1)
                if not draft.is_chain and tree.room(draft) > places:
                    draft = tree.trunk(draft)
                self._drafted = draft
                return draft.padded(rows - 1, root)
        return None

    def pause(self) -> None:
        """What follows is not of the step: somebody else has the word."""
        if self._running is not None:
            self._spent += self._clock() - self._running
            self._running = None

    def resume(self) -> None:
        """The step goes on."""
        self._running = self._clock()

    def plain(self) -> None:
        """The step that `propose` has begun was done without a draft."""
        if self._running is None:
            return  # the first token of a request is its prompt's
        self.pause()
        seconds = self._spent - self._draft_seconds
        for tally in (self.total, self.last):
            tally.plain(seconds)
            tally.seconds_draft += self._draft_seconds
        self.controls.told(1, seconds)

    def verified(self, path: Sequence[int], rows: int) -> None:
        """The step that `propose` has begun has verified its draft in so many rows: the nodes of `path` were right."""
        self.pause()
        seconds, draft = self._spent - self._draft_seconds, self._drafted
        assert draft is not None
        right = [node for node in path if node < len(draft)]  # the rest was no draft, and a lucky guess
        for tally in (self.total, self.last):
            tally.verified(draft, right, seconds)
            tally.lucky += len(path) - len(right)
            tally.seconds_draft += self._draft_seconds
        self.controls.told(rows, seconds, draft, right)

    def _ask(self, at: int, drafter: Drafter, text: Int32s, root: int, most: int) -> Draft | None:
        """A draft that can be verified; None if there is none, whatever the drafter does."""
        try:
            if not drafter.wants and self._known[at] < len(text):
                drafter.observe(self._known[at], text[self._known[at] :], None)
                self._known[at] = len(text)
            proposed = drafter.propose(root, most)
            if proposed is None:
                return None
            draft = checked(proposed, n_vocab=self._n_vocab, most=most, ends=self._ends)
        except DraftError as err:
            self._count_bad(at)
            if self._bad[at] >= MOST_BAD:
                self._disable(at, str(err))
            return None
        except Exception as err:  # it is anybody's code, and nothing depends on it
            self._count_bad(at)
            self._disable(at, f"{type(err).__name__}: {err}")
            return None
        self._bad[at] = 0
        return draft

    def _count_bad(self, at: int) -> None:
        self._bad[at] += 1
        self.total.bad_drafts += 1
        self.last.bad_drafts += 1

    def _disable(self, at: int, why: str) -> None:
        self._bad[at] = MOST_BAD
        logger.warning("nothing is drafted by %s any more: %s", self.drafters[at].name, why)
        self.off = why

    def _remove_failed(self) -> None:
        failed = [at for at, bad in enumerate(self._bad) if bad >= MOST_BAD]
        for at in reversed(failed):
            self.drafters.pop(at).close()
            del self._known[at], self._bad[at]
        if self.drafters and failed:
            self.off = None

    # --- what becomes of the text

    def evaluated(self, start: int, tokens: Int32s, *, ahead: bool) -> None:
        """See `session.step.Follower`."""
        if self._features is None:
            return
        rows = self._features.read(len(tokens))  # which waits for the compute
        if ahead:
            self._ahead = (start, tokens, rows)
        else:
            self._observe(start, tokens, rows)

    def settled(self, path: Sequence[int]) -> None:
        """See `session.step.Follower`."""
        if self._ahead is not None:
            start, tokens, rows = self._ahead
            self._ahead = None
            self._observe(start, tokens[list(path)], rows[list(path)])

    def truncated(self, length: int) -> None:
        """See `session.step.Follower`."""
        self._ahead = None
        for at, drafter in enumerate(self.drafters):
            if self._known[at] > length:
                self._known[at] = length
                self._tell(at, partial(drafter.cut, length))

    def freeze(self) -> list[SavedDraft]:
        """See `session.step.Follower`."""
        return remember.freeze(drafter for at, drafter in enumerate(self.drafters) if self._known[at])

    def adopt(self, saved: Sequence[SavedDraft], tokens: Int32s) -> None:
        """See `session.step.Follower`."""
        for at, drafter in enumerate(self.drafters):
            self._known[at] = len(tokens)  # an interrupt is followed by a cut to nothing
            self._known[at] = remember.adopt(drafter, saved, tokens)

    def _observe(self, start: int, tokens: Int32s, rows: Floats) -> None:
        assert self._features is not None
        for at, drafter in enumerate(self.drafters):
            if drafter.wants and len(tokens):
                self._known[at] = start + len(tokens)
                self._tell(at, partial(drafter.observe, start, tokens, self._features.of(drafter.wants, rows)))

    def _tell(self, at: int, what: Callable[[], None]) -> None:
        """The text goes on, whatever a drafter makes of it."""
        try:
            what()
        except Exception as err:
            self._disable(at, f"{type(err).__name__}: {err}")
