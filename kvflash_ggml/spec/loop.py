"""Between a text and its drafters: which drafter is asked, how much of its draft is verified, and the counts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from ..arrays import Floats, Int32s
from ..errors import DraftError, SnapshotError
from ..state.session import SavedDraft
from . import tree
from .base import Drafter, FeatureRows, Remembering, Sometimes
from .decision import Controls
from .draft import Draft, DraftStats, checked

MAX_BAD = 3
"""Unverifiable drafts in a row after which a drafter is not asked any more; the same number of failed steps."""

UNASKED = 64
"""Steps without a draft after which a drafter that was not asked gets no more of the target's rows: to read these takes
time at each step.
"""

AGAIN = 8
"""How many of these steps are left after a prompt: every drafter gets the rows of a prompt."""

WARM = 32
"""Tokens whose rows a drafter must get, after a pause, before it is asked again."""


ANOTHER = "drafting for another text"
"""Why drafters that serve one text at a time do not draft for this one."""


@dataclass(slots=True)
class AskedDrafter:
    """A drafter and its bookkeeping.

    known: tokens of the text that it has observed. read: length of the text when it was asked last. bad: unverifiable
    drafts in a row; why: the reason, once it is not asked any more. deciding: seconds that the last decision about its
    draft took. unasked: steps without a draft since it was asked. missing: tokens whose rows it must get before it is
    asked. lone: it drafts only for a text that is decoded alone, see `Speculator.lend`.
    """

    drafter: Drafter
    lone: bool = False
    known: int = 0
    read: int = 0
    bad: int = 0
    why: str = ""
    deciding: float = 0.0
    unasked: int = 0
    missing: int = 0
    _sometimes: Sometimes | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._sometimes = self.drafter if isinstance(self.drafter, Sometimes) else None

    @property
    def failed(self) -> bool:
        return self.bad >= MAX_BAD

    @property
    def able(self) -> bool:
        """Whether it may have something to propose."""
        return not self.failed and (self._sometimes is None or self._sometimes.able)

    @property
    def follows(self) -> bool:
        """Whether it gets the target's rows of each step."""
        return not self.failed and self.unasked <= UNASKED

    def reads(self, count: int, *, ahead: bool) -> bool:
        """Count a step of `count` tokens. Returns whether the drafter gets the target's rows of these tokens."""
        if count == 1:
            self.unasked += 1
        elif not ahead:
            self.unasked = min(self.unasked, UNASKED - AGAIN)
        if not self.follows:
            self.missing = WARM
        return self.follows and bool(self.drafter.wants)

    def behind(self, length: int) -> int:
        """Return how many tokens of a text of `length` it reads before it drafts."""
        if self.missing and self.drafter.wants:
            return self.missing  # it reads nothing before these
        newest = self.drafter.wants.newest
        return length - self.read if newest is None else min(newest, length - self.read)

    def truncate(self, length: int) -> None:
        """Note that the text was cut to `length` tokens."""
        self.known, self.read = min(self.known, length), min(self.read, length)

    def told(self, start: int, count: int) -> None:
        """Note that it gets the rows of these tokens."""
        if start > self.known:
            self.read = start
        self.known = start + count
        self.missing = max(0, self.missing - count)

    def begin_anew(self) -> None:
        """Forget the text, which has grown without this drafter."""
        self.known = self.read = self.unasked = 0
        self.missing = WARM

    def is_ready(self) -> bool:
        """Return whether it can be asked. It gets the target's rows from now on."""
        self.unasked = 0
        return not (self.drafter.wants and self.missing)


logger = logging.getLogger("kvflash_ggml")


class Text(Protocol):
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
    nested: a speculator whose drafts one of these drafters extends; this one tells it of the text. off: why nothing is
    drafted any more; None while some drafters are asked. resting: why the lone drafters are not asked now. Steps for
    which no drafter will be asked are neither timed nor counted one by one.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter | AskedDrafter],
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
        self._total, self._last = total or DraftStats(), DraftStats()
        self.off: str | None = None
        self.resting: str | None = None
        self.nested = nested
        self._all = [one if isinstance(one, AskedDrafter) else AskedDrafter(one) for one in drafters]
        self._asked = self._all  # or without the lone ones
        self._refused = 0  # steps in a row that failed with a draft
        self._n_vocab = n_vocab
        self._ends = frozenset(ends)
        self._features = features
        self._clock = clock
        self._end: int | None = None  # longest length of the text in this request
        self._prompt = 0  # end of the prompt that is being read
        self._ahead: tuple[int, Int32s, Floats] | None = None
        self._ahead_from: int | None = None  # start of the draft rows
        self._timed = False  # whether the current step is timed
        self._running: float | None = None  # when it began or resumed
        self._spent = 0.0
        self._beside = 0  # rows of other texts in it
        self._draft_seconds = 0.0
        self._drafted: Draft | None = None
        self._idle = 0  # coming steps for which no drafter is asked
        self._passed = 0  # such steps that are not counted yet

    @property
    def total(self) -> DraftStats:
        """Counts since the model was loaded."""
        self._tell_passed()
        return self._total

    def counted(self) -> tuple[DraftStats, DraftStats]:
        """Return `last` and `total` from any thread. Their newest plain steps may be missing."""
        return self._last, self._total

    @property
    def last(self) -> DraftStats:
        """Counts since `begin`."""
        self._tell_passed()
        return self._last

    @property
    def types(self) -> tuple[str, ...]:
        """The names of the drafters that are asked, or rest."""
        return tuple(drafter.name for drafter in self.drafters)

    @property
    def asked(self) -> Sequence[AskedDrafter]:
        """The drafters with their bookkeeping, for another speculator that asks them too."""
        return tuple(self._all)

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        """The drafters that are asked, or rest. The others are closed, or will be."""
        return tuple(one.drafter for one in self._all if not one.failed)

    def lend(self, why_not: str | None) -> None:
        """Ask the lone drafters from the next step on, or let them rest for the reason `why_not`.

        They know nothing of this text at first. Another speculator that asks the same drafters must let them rest
        before. Rows that a resting drafter has drafted are verified as always.
        """
        lone = [one for one in self._all if one.lone and not one.failed]
        if why_not is None and self.resting is not None:
            for one in lone:
                one.begin_anew()
                self._tell(one, partial(one.drafter.truncate, 0))
        self._tell_passed()
        self._idle = 0
        names = ", ".join(one.drafter.name for one in lone)
        self.resting = f"{names}: {why_not}" if lone and why_not else None
        self._asked = self._all if why_not is None else [one for one in self._all if not one.lone]

    def begin(self, length: int, most: int | None = None) -> None:
        """Begin a request on a text of `length` tokens, which grows by at most `most`."""
        self._tell_passed()
        self._last = DraftStats()
        self._idle = 0
        self._timed, self._running = False, None
        self._end = None if most is None else length + most
        self._prompt = length
        self.controls.begin(length)
        if self.nested is not None:
            self.nested.begin(length)

    # --- one step

    def apart(self) -> None:
        """Note that steps of another kind ran in between, so their times are not compared."""
        self.controls.apart()

    def propose(self, text: Text, root: int) -> Draft | None:
        """Return a draft after the text and `root`, no longer than a step can verify; None for a plain step.

        From here on the step is timed, until `plain` or `verified`, unless it is known that no drafter will be asked.
        """
        if self._idle:
            self._idle -= 1
            self._passed += 1
            return None
        self._tell_passed()
        self._remove_failed()
        self._spent = self._draft_seconds = 0.0
        self._timed, self._beside = True, 0
        self._running = began = self._clock()
        draft, length = None, len(text.tokens)
        able = [one for one in self._asked if one.able]
        for at, one in enumerate(able):
            instead = tuple(other.drafter.name for other in able[at + 1 :])
            wanted = self.controls.ask(one.drafter.name, one.behind(length), instead)
            if wanted:
                draft = self._draft(one, text, root, wanted, instead)
                self._draft_seconds = self._clock() - began
                if draft is not None:
                    break
        return draft

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

    def cut(self, count: int) -> None:
        """Verify at most `count` tokens of the draft that `propose` has returned."""
        self._drafted = None if self._drafted is None else self._drafted.first(count)

    def plain(self, rows: int = 1, filled: int = 0) -> None:
        """Count the step that `propose` began as done without a draft.

        rows: above 1 where copies of the root filled the step. filled: tokens that these copies won.
        """
        if not self._timed:
            return  # the first token of a request is its prompt's
        self.pause()
        self._timed = False
        seconds = self._spent - self._draft_seconds
        for stats in (self._total, self._last):
            stats.plain(seconds, self._draft_seconds)
            stats.filled += filled
        self.controls.told(rows, seconds, beside=self._beside)
        self._idle = self.controls.idle([one.drafter.name for one in self._asked if not one.failed])

    def _tell_passed(self) -> None:
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
        self.pause()
        self._timed = False
        seconds, draft = self._spent - self._draft_seconds, self._drafted
        assert draft is not None
        self._refused = 0
        right = [node for node in path if node < len(draft)]  # the rest were padding rows, accepted by luck
        for stats in (self._total, self._last):
            stats.verified(draft, right, seconds, self._draft_seconds, stopped=stopped)
            stats.lucky += len(path) - len(right)
        self.controls.told(rows, seconds, draft, right, stopped=stopped, beside=self._beside)

    def refused(self, why: Exception) -> None:
        """Note that a step with a draft failed and runs without it. After MAX_BAD in a row nothing is drafted any
        more.
        """
        self._timed, self._running = False, None
        self._refused += 1
        if self._refused >= MAX_BAD:
            self.off = f"{type(why).__name__}: {why}"
            logger.warning(
                "nothing is drafted any more by %s: drafts cannot be verified: %s", ", ".join(self.types), why
            )
            for one in self._asked:
                one.bad, one.why = MAX_BAD, self.off
            if self.nested is not None:
                self.nested.off = self.off  # it is not asked any more either

    def _draft(self, one: AskedDrafter, text: Text, root: int, wanted: int, instead: Collection[str]) -> Draft | None:
        """Return the part of one drafter's proposal that is worth verifying, or None."""
        tokens = text.tokens
        if not one.is_ready():
            return None
        most = min(wanted, text.room_ahead - 1)
        if self._end is not None:
            most = min(most, self._end - len(tokens) - 2)  # the root counts already, and the target adds one token
        if most < 1:
            return None
        if not one.drafter.wants and one.known < len(tokens):  # this is fast, except for a long prompt
            start, one.known = one.known, len(tokens)
            self._tell(one, partial(one.drafter.observe, start, _locked(tokens[start:]), None))
            if one.failed:
                return None
        one.read = len(tokens)
        name, began = one.drafter.name, self._clock()
        draft = self._ask(one, root, most)
        asked = self._clock()
        self.controls.proposed(name, draft, asked - began + one.deciding)
        if draft is None or len(draft) == 0:
            return None
        rows = min(self.controls.choose(draft, instead), most + 1)
        one.deciding = self._clock() - asked
        if rows <= 1:
            return None
        draft = draft.first(rows - 1)
        if not draft.is_chain and tree.room(draft) > text.branch_room:
            draft = tree.trunk(draft)
        self._drafted = draft
        return draft.padded(rows - 1, root)

    def _ask(self, one: AskedDrafter, root: int, most: int) -> Draft | None:
        """Return a draft that can be verified; None if there is none, whatever the drafter does."""
        drafter = one.drafter
        try:
            proposed = drafter.propose(root, most)
            if proposed is None:
                return None
            if not isinstance(proposed, Draft):
                raise DraftError(f"{drafter.name}: {proposed!r:.100} is no draft")
            draft = checked(replace(proposed, source=drafter.name), n_vocab=self._n_vocab, most=most, ends=self._ends)
        except DraftError as err:
            self._count_bad(one)
            if one.failed:
                self._disable(one, str(err))
            return None
        except Exception as err:  # a drafter may be anybody's code, and the text does not depend on it
            self._count_bad(one)
            self._disable(one, f"{type(err).__name__}: {err}")
            return None
        one.bad = 0
        return draft

    def _count_bad(self, one: AskedDrafter) -> None:
        one.bad += 1
        self._total.bad_drafts += 1
        self._last.bad_drafts += 1

    def _disable(self, one: AskedDrafter, why: str) -> None:
        one.bad, one.why = MAX_BAD, why
        logger.warning("%s does not draft any more: %s", one.drafter.name, why)
        if all(other.failed for other in self._all):
            self.off = why

    def _remove_failed(self) -> None:
        """Close the drafters that are not asked any more."""
        failed = [one for one in self._asked if one.failed]
        if failed:
            self._all = [one for one in self._all if not one.failed]
            self._asked = [one for one in self._asked if not one.failed]
            self.off = self.off if self._all else failed[-1].why
        for one in failed:
            try:
                one.drafter.close()
            except Exception as err:
                logger.info("%s could not be closed: %s", one.drafter.name, err)

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
        if not sum([one.reads(len(tokens), ahead=ahead) for one in self._asked]):
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
            self._forget(self._ahead_from)
            self._ahead_from = None
        if self._ahead is not None:
            start, tokens, rows = self._ahead
            self._ahead = None
            self._observe(start, tokens[list(path)], rows[list(path)])

    def truncated(self, length: int) -> None:
        self._ahead = self._ahead_from = None
        self._forget(length)

    def _forget(self, length: int) -> None:
        """Tell every drafter that observed more than `length` tokens that the text ends there."""
        for one in self._asked:
            if one.known > length:
                one.truncate(length)
                self._tell(one, partial(one.drafter.truncate, length))

    def state(self) -> list[SavedDraft]:
        return _states(one.drafter for one in self._asked if one.known and one.follows)

    def load(self, saved: Sequence[SavedDraft], tokens: Int32s) -> None:
        for one in self._asked:
            if one.failed:
                continue
            one.known = len(tokens)  # after an interrupt the text is cut to nothing
            one.known = one.read = _load(one.drafter, saved, tokens)
            one.missing = 0

    def _observe(self, start: int, tokens: Int32s, rows: Floats) -> None:
        assert self._features is not None
        for one in self._asked:
            wants = one.drafter.wants
            if wants and one.follows and len(tokens):
                one.told(start, len(tokens))
                self._tell(one, partial(one.drafter.observe, start, tokens, self._features.of(wants, rows)))

    def _tell(self, one: AskedDrafter, what: Callable[[], None]) -> None:
        """Call a drafter's method. If it raises, the drafter is switched off and the text goes on."""
        if one.failed:
            return
        try:
            what()
        except Exception as err:
            self._disable(one, f"{type(err).__name__}: {err}")


def _locked(tokens: Int32s) -> Int32s:
    """Return the tokens as a read-only view."""
    seen: Int32s = tokens.view()
    seen.flags.writeable = False
    return seen


def _states(drafters: Iterable[Drafter]) -> list[SavedDraft]:
    """Return the states of the drafters that have one."""
    saved = []
    for drafter in drafters:
        if isinstance(drafter, Remembering):
            try:
                one = drafter.state()
            except Exception as err:
                logger.warning("the state of %s is not saved: %s", drafter.name, err)
            else:
                saved += [one] if one is not None else []
    return saved


def _load(drafter: Drafter, saved: Sequence[SavedDraft], tokens: Int32s) -> int:
    """Give a drafter the saved state of its kind. Returns how many tokens of the text it knows then.

    That is 0 if the text was saved without drafters. The restored drafter proposes once as a test: a file may hold
    anything.
    """
    if not saved or not isinstance(drafter, Remembering):
        return 0
    try:
        own = [one for one in saved if one.origin.name == drafter.name]
        if not own:
            raise SnapshotError("it did not draft when the text was saved")
        drafter.load(own[0])
        drafter.propose(int(tokens[-1]), 1)
        return own[0].length
    except Exception as err:
        logger.warning("%s starts anew behind the restored text: %s", drafter.name, err)
    drafter.truncate(0)
    return 0


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
        """Statistics of drafts that the pool verified for a lossless answer; None where no drafter drafts for the
        pool.
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
