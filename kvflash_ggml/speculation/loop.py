"""Between a text and its drafters: which drafter is asked, how much of its draft is verified, and the counts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Protocol

from ..arrays import Floats, Int32s
from ..errors import DraftError
from ..state.session import SavedDraft
from . import tree
from .base import Drafter, FeatureRows
from .decision import Controls
from .draft import ROOT, Draft, DraftStats, chain
from .guarded import MAX_BAD, GuardedDrafter

ANOTHER = "drafting for another text"
"""Why drafters that serve one text at a time do not draft for this one."""

logger = logging.getLogger("kvflash_ggml")


class DraftedText(Protocol):
    """The text to draft for. tokens: of the text, without the root. room_ahead: rows that one step can verify.

    branch_room: positions that the rows of a tree can take, 0 where only chains can be verified.
    """

    @property
    def tokens(self) -> Int32s: ...
    @property
    def room_ahead(self) -> int: ...
    @property
    def branch_room(self) -> int: ...


class Speculator:
    """Asks the drafters of one text in turn, and learns from the outcome of their drafts. It follows the text.

    drafters: or the bookkeeping of another speculator's drafters. controls: decides which drafts are worth it. n_vocab:
    of the target. ends: tokens that end a text. features: the target's rows for drafters; None if no drafter wants any.
    A drafter that was not asked for long gets no rows until it is worth asking again. total: counts of earlier drafts.
    nested: a speculator whose drafts one of these drafters extends; this one tells it of the text. resting: why the
    lone drafters are not asked now. Steps for which no drafter will be asked are neither timed nor counted one by one.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter | GuardedDrafter],
        controls: Controls,
        *,
        n_vocab: int,
        ends: Collection[int],
        features: FeatureRows | None = None,
        total: DraftStats | None = None,
        nested: Speculator | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.controls = controls
        self.resting: str | None = None
        self.nested = nested
        self._total, self._last = total or DraftStats(), DraftStats()
        self._all = [one if isinstance(one, GuardedDrafter) else GuardedDrafter(one) for one in drafters]
        for one in self._all:
            one.attach(self)
        self._n_vocab = n_vocab
        self.ends = frozenset(ends)
        self._features = features
        self._failures = 0  # steps in a row that failed with a draft
        self._refusal: str | None = None
        self._end: int | None = None  # longest length of the text in this request
        self._prompt = 0  # end of the prompt that is being read
        self._ahead: tuple[int, Int32s, Floats] | None = None  # draft rows: their start, tokens, and the target's rows
        self._ahead_from: int | None = None
        # the current step
        self._clock = clock
        self._timed = False
        self._running: float | None = None  # when it began or resumed
        self._spent = 0.0
        self._draft_seconds = 0.0
        self._beside = 0  # rows of other texts in it
        self._draft: Draft | None = None
        self._idle = 0  # coming steps for which no drafter is asked
        self._passed = 0  # such steps that are not counted yet

    @property
    def total(self) -> DraftStats:
        """Counts since the model was loaded."""
        self._count_passed()
        return self._total

    def counted(self) -> tuple[DraftStats, DraftStats]:
        """Return `last` and `total` from any thread. Their newest plain steps may be missing."""
        return self._last, self._total

    @property
    def last(self) -> DraftStats:
        """Counts since `begin`."""
        self._count_passed()
        return self._last

    @property
    def off(self) -> str | None:
        """Why nothing is drafted any more; None while some drafters are asked."""
        if self._refusal is None and self._all and all(one.failed for one in self._all):
            return self._all[-1].why
        return self._refusal

    @property
    def active(self) -> Sequence[GuardedDrafter]:
        """The drafters with their bookkeeping that are asked, or rest: for another speculator that asks them too."""
        return tuple(one for one in self._all if not one.failed)

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        """The drafters that are asked, or rest. The others are closed, or will be."""
        return tuple(one.drafter for one in self.active)

    @property
    def types(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(one.name for one in self.active)

    @property
    def _awake(self) -> Sequence[GuardedDrafter]:
        """The drafters that are asked now."""
        return [one for one in self._all if not (one.failed or (one.lone and self.resting))]

    def lend(self, why_not: str | None) -> None:
        """Ask the lone drafters from the next step on, or let them rest for the reason `why_not`.

        They follow this text then. Another speculator that asks the same drafters must let them rest before. Rows that
        a resting drafter has drafted are verified as always.
        """
        self._count_passed()
        self._idle = 0
        lone = [one for one in self.active if one.lone]
        if why_not is None:
            for one in lone:
                one.move_to(self)
        self.resting = f"{', '.join(one.name for one in lone)}: {why_not}" if lone and why_not else None

    def begin(self, length: int, max_new: int | None = None) -> None:
        """Begin a request on a text of `length` tokens, which grows by at most `max_new`."""
        self._count_passed()
        self._last = DraftStats()
        self._idle = 0
        self._timed, self._running = False, None
        self._end = None if max_new is None else length + max_new
        self._prompt = length
        self.controls.begin(length)
        if self.nested is not None:
            self.nested.begin(length)

    # --- one step

    def apart(self) -> None:
        """Note that steps of another kind ran in between, so their times are not compared."""
        self.controls.apart()

    def propose(self, text: DraftedText, root: int) -> Draft | None:
        """Return a draft after the text and `root`, no longer than a step can verify; None for a plain step.

        From here on the step is timed, until `plain` or `verified`, unless it is known that no drafter will be asked.
        """
        if self._idle:
            self._idle -= 1
            self._passed += 1
            return None
        self._count_passed()
        for one in self._all:
            if one.failed:
                one.close()
        self._spent = self._draft_seconds = 0.0
        self._timed, self._beside = True, 0
        self._running = began = self._clock()
        able = [one for one in self._awake if one.able]
        for at, one in enumerate(able):
            instead = tuple(other.name for other in able[at + 1 :])
            requested = self.controls.ask(one.name, one.unread(len(text.tokens)), instead)
            if requested:
                draft = self._request(one, text, root, requested, instead)
                self._draft_seconds = self._clock() - began
                if draft is not None:
                    return draft
        return None

    def _request(
        self, one: GuardedDrafter, text: DraftedText, root: int, requested: int, instead: Collection[str]
    ) -> Draft | None:
        """Return the part of one drafter's proposal that is worth verifying, or None."""
        tokens = text.tokens
        one.idle_steps = 0  # it gets the target's rows from now on
        if one.drafter.wants and one.missing:
            return None
        limit = min(requested, text.room_ahead - 1)
        if self._end is not None:
            limit = min(limit, self._end - len(tokens) - 2)  # the root counts already, and the target adds one token
        if limit < 1:
            return None
        if not one.drafter.wants and one.observed < len(tokens):  # this is fast, except for a long prompt
            news = tokens[one.observed :]
            news.flags.writeable = False
            one.observe(one.observed, news, None)
            if one.failed:
                return None
        one.read = len(tokens)
        began = self._clock()
        try:
            draft = one.propose(root, limit, n_vocab=self._n_vocab, ends=self.ends)
        except DraftError:
            draft = None
            for stats in (self._total, self._last):
                stats.bad_drafts += 1
        proposed = self._clock()
        self.controls.proposed(one.name, draft, proposed - began + one.deciding)
        if draft is None or len(draft) == 0:
            return None
        rows = min(self.controls.choose(draft, instead), limit + 1)
        one.deciding = self._clock() - proposed
        if rows <= 1:
            return None
        draft = draft.first(rows - 1)
        if not draft.is_chain and tree.room(draft) > text.branch_room:
            draft = tree.trunk(draft)
        self._draft = draft
        return draft.padded(rows - 1, root)

    def pause(self) -> None:
        """Stop the clock: the time that follows does not belong to the step."""
        if self._running is not None:
            self._spent += self._clock() - self._running
            self._running = None

    def resume(self, seconds: float = 0.0, beside: int = 0) -> None:
        """Start the clock again. The step took `seconds` meanwhile, with `beside` rows of other texts beside its
        own.
        """
        if self._timed:
            self._spent += seconds
            self._beside = max(self._beside, beside)
            self._running = self._clock()

    def arranged(self, root: int, draft: Draft) -> Verified:
        """Return a draft after the token `root` as the rows of a step."""
        own = 0 if self._draft is None else len(self._draft)
        return Verified(draft, tree.rows(root, draft), self, own=own)

    def levelled(self, root: int, verified: Verified | None, rows: int) -> Verified:
        """Return a draft with `rows` rows, the root's among them: it is cut, or copies of the root fill it up.

        verified: None where nothing was drafted.
        """
        draft = (chain([], "") if verified is None else verified.draft).first(rows - 1).padded(rows - 1, root)
        filled = verified is None or verified.filled or rows == 1
        return Verified(draft, tree.rows(root, draft), self, filled)

    def cut(self, count: int) -> None:
        """Verify at most `count` tokens of the draft that `propose` has returned."""
        self._draft = None if self._draft is None else self._draft.first(count)

    def _end_step(self) -> float:
        """Stop the clock. Returns the seconds of the step without proposals."""
        self.pause()
        self._timed = False
        return self._spent - self._draft_seconds

    def plain(self, rows: int = 1, filled: int = 0) -> None:
        """Count the step that `propose` began as done without a draft.

        rows: above 1 where copies of the root filled the step. filled: tokens that these copies won.
        """
        if not self._timed:
            return  # the first token of a request is its prompt's
        seconds = self._end_step()
        for stats in (self._total, self._last):
            stats.plain(seconds, self._draft_seconds)
            stats.filled += filled
        self.controls.record(rows, seconds, beside=self._beside)
        self._idle = self.controls.idle([one.name for one in self._awake])

    def replaced(self) -> None:
        """Count a drafted token that might have stayed, and in whose place another was drawn."""
        for stats in (self._total, self._last):
            stats.replaced += 1

    def _count_passed(self) -> None:
        """Count steps that were not timed. They took as long as plain steps take."""
        steps, self._passed = self._passed, 0
        if steps:
            seconds = self.controls.passed(steps)
            for stats in (self._total, self._last):
                stats.plain_steps += steps
                stats.seconds_plain += seconds

    def verified(self, path: Sequence[int], rows: int, *, stopped: bool = False) -> None:
        """Count the step that `propose` began: it verified its draft in `rows` rows and accepted the nodes of `path`.

        stopped: the answer ended there, and later nodes were not tested.
        """
        seconds, draft = self._end_step(), self._draft
        assert draft is not None
        self._failures = 0
        right = [node for node in path if node < len(draft)]  # the rest were padding rows, accepted by luck
        for stats in (self._total, self._last):
            stats.verified(draft, right, seconds, self._draft_seconds, stopped=stopped)
            stats.lucky += len(path) - len(right)
        self.controls.record(rows, seconds, draft, right, stopped=stopped, beside=self._beside)

    def refused(self, why: Exception) -> None:
        """Note that a step with a draft failed and runs without it. After MAX_BAD in a row nothing is drafted any
        more.
        """
        self._timed, self._running = False, None
        self._failures += 1
        if self._failures >= MAX_BAD:
            logger.warning(
                "nothing is drafted any more by %s: drafts cannot be verified: %s", ", ".join(self.types), why
            )
            self._refusal = f"{type(why).__name__}: {why}"
            for one in self._awake:
                one.bad, one.why = MAX_BAD, self._refusal
            if self.nested is not None:
                self.nested._refusal = self._refusal  # it is not asked any more either

    # --- changes of the text (see `sequence.step.Follower`)

    def evaluated(self, start: int, tokens: Int32s, *, ahead: bool) -> None:
        if ahead and self._ahead_from is None:
            self._ahead_from = start
        if self._features is None:
            return
        end, newest = start + len(tokens), self._features.newest
        if newest is not None and end <= self._prompt - newest:
            return  # Drafters use newer rows only. To read these would make the step wait for the device.
        self._prompt = 0 if end >= self._prompt else self._prompt
        if not sum([one.wants_step(len(tokens), ahead=ahead) for one in self._awake]):
            return
        rows = self._features.read(len(tokens))
        if ahead:
            self._ahead = (start, tokens, rows)
        else:
            self._observe(start, tokens, rows)

    def retained(self, length: int) -> None:
        if self._ahead is not None:
            start, tokens, rows = self._ahead
            self._ahead = None
            self._observe(start, tokens[: length - start], rows[: length - start])

    def settled(self, path: Sequence[int]) -> None:
        if self._ahead_from is not None:
            self._cut(self._ahead_from)
            self._ahead_from = None
        if self._ahead is not None:
            start, tokens, rows = self._ahead
            self._ahead = None
            self._observe(start, tokens[list(path)], rows[list(path)])

    def truncated(self, length: int) -> None:
        self._ahead = self._ahead_from = None
        self._cut(length)

    def state(self) -> list[SavedDraft]:
        states = [one.state(self) for one in self.active]
        return [state for state in states if state is not None]

    def load(self, saved: Sequence[SavedDraft], tokens: Int32s) -> None:
        for one in self.active:
            one.load(self, saved, len(tokens))

    def _cut(self, length: int) -> None:
        for one in self._all:
            one.truncate(self, length)

    def _observe(self, start: int, tokens: Int32s, rows: Floats) -> None:
        assert self._features is not None
        for one in self._awake:
            if one.drafter.wants and one.gets_rows and len(tokens):
                one.observe(start, tokens, (self._features, rows))


@dataclass(slots=True)
class Verified:
    """A draft whose rows one step verifies. node: the newest accepted one. path: all accepted ones, in order.

    filled: there is no draft, and copies of the root only fill a step, see `Speculator.levelled`. own: nodes that were
    drafted; those behind them only pad the draft. picks: the likeliest token after each row, where nothing else
    decides. child: the draft's node for the token that was drawn last; None where the draft was wrong.
    """

    draft: Draft
    rows: tree.Rows
    speculator: Speculator
    filled: bool = False
    own: int = 0
    node: int = ROOT
    path: list[int] = field(default_factory=list)
    picks: list[int] | None = None
    child: int | None = None

    def next_of(self, source: str) -> int | None:
        """Return the token that a drafter of chains has drafted after the newest accepted one; None for no such, and
        for one that ends the text.
        """
        after = self.node + 1
        if self.draft.source != source or after >= self.own:
            return None
        token = int(self.draft.tokens[after])
        return None if token in self.speculator.ends else token

    def end(self) -> None:
        """Tell the speculator which rows of the draft were accepted."""
        if self.filled:
            self.speculator.plain(len(self.rows), len(self.path))
        else:
            self.speculator.verified(self.path, len(self.rows), stopped=self.child is not None)


class SpecStats:
    """A read-only view of a speculator. Counters are in `total`, and of the newest request in `last`, as copies."""

    def __init__(self, speculator: Speculator) -> None:
        self._speculator = speculator

    def __repr__(self) -> str:
        return f"<drafts by {', '.join(self.types) or 'nobody'}: {self.total}>"

    @property
    def types(self) -> tuple[str, ...]:
        """The drafters that are asked, in this order. Some may rest while several texts are decoded together."""
        return self._speculator.types

    @property
    def off(self) -> str | None:
        """Why nothing is drafted any more, or which drafters rest now, and why; None while all may be asked."""
        return self._speculator.off or self._speculator.resting

    @property
    def speedup(self) -> float | None:
        """Estimate of how many times faster than plain decoding the newest answer is.

        None before that is known, and with a fixed width.
        """
        return self._speculator.controls.speedup

    @property
    def excess(self) -> float:
        """Seconds that drafts have cost the newest answer beyond what they won, below 0 if they won."""
        return self._speculator.controls.excess

    @property
    def idle(self) -> str | None:
        """Why the last step verified nothing; None if it verified a draft."""
        return self._speculator.controls.off

    @property
    def on_pool(self) -> SpecStats | None:
        """Statistics of drafts that the pool verified for a lossless or auto answer; None where no drafter drafts for
        the pool.
        """
        nested = self._speculator.nested
        return None if nested is None else SpecStats(nested)

    @property
    def total(self) -> DraftStats:
        """Counts since the model was loaded."""
        return deepcopy(self._speculator.total)

    @property
    def last(self) -> DraftStats:
        """Counts of the newest request."""
        return deepcopy(self._speculator.last)
