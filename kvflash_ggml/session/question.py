"""The end of a prompt is read twice: to see what it asks for, and with that. Who asks the same again has it once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..arrays import Floats, Int32s
from ..pool.page_table import PageTableState
from ..state.session import Found
from .scoring import Scoring
from .step import EVERY, LAST, AfterStep
from .text import Text

QUESTION_TOKENS = 64
"""Tokens at the end of a prompt that are taken for its question, and read again with what it asks for."""

LEFT_OVER = 16
"""Tokens in front of these that are read with them where a prompt has no more: the newest token of the last answer, and
marks of a template. A step of their own would take as long, and the state after them would have to be kept."""


@dataclass(frozen=True, slots=True)
class Before:
    """A text as it is before a step. table: with the scores that the step goes by. rebuild: see `Text`."""

    start: int
    table: PageTableState
    rebuild: bool

    @classmethod
    def of(cls, text: Text) -> Before:
        table = replace(text.table.state(text.ranking), pins=frozenset())  # these are of a request
        return cls(text.length, table, text.rebuild)


class AskedText(Text):
    """A text whose resident set goes by scores, and what is found by the ends of its prompts."""

    scoring: Scoring | None = None

    def _take(self, ranking: Floats | None, *, sparingly: bool = False) -> None:
        """Go by new scores, if there are any. sparingly: beside those before, and pages move only where that pays."""
        if ranking is None or self.scoring is None:
            return
        self.events.score(ranking)
        if not sparingly:
            self.ranking, self.rebuild = ranking, True
            return
        lasting = self.scoring.lasting(ranking, self.ranking)
        self.ranking, self.rebuild = self.scoring.sparing(lasting, *self.table.unprotected(), self.table.quota)

    def _question_size(self, total: int) -> int:
        """How many of the prompt's last tokens are evaluated twice: first to see what they ask for, then with it."""
        info = self.engine.info
        pageable = self.scoring is not None and self.length + total > info.n_slots
        can_go_back = self.config.checkpoints > 0 or not (info.recurrent or info.n_swa > 0)
        if not pageable or not can_go_back:
            return 0
        return min(total if total <= QUESTION_TOKENS + LEFT_OVER else QUESTION_TOKENS, self.pool.n_ubatch)

    def _reread_question(self, tokens: Int32s, before: Before, *, output_all: bool, after: AfterStep | None) -> None:
        """Recall what the end of the prompt asks for, and evaluate it again, so that its logits have seen it.

        before: the last step that has read it.
        """
        assert self.scoring is not None
        start = self.length - len(tokens)
        ranking = self.scoring.take()
        self._take(ranking)
        if ranking is not None and self.table.would_recall(start, ranking):
            left = self.truncate(start)
            assert left == start, "a checkpoint is taken before the last step of a prompt"
            self.ranking, self.rebuild = ranking, True
            before = Before.of(self)
            self.evaluate(tokens, EVERY if output_all else LAST, after)
        elif ranking is not None:
            self.events.changed(self.length, self.table.resident_chunks, generating=False)
        found = Found(
            start=before.start,
            tokens=self.tokens[before.start :].copy(),
            table=before.table,
            rebuild=before.rebuild,
            ranking=self.ranking,
            due=self.rebuild,
        )
        self.scoring.findings.keep(found)

    def _in_one_step(self, found: Found | None) -> Found | None:
        """The same if its tokens fit a step here, else None: a file may come from a session with longer steps."""
        if found is None or len(found.tokens) > min(self.pool.n_ubatch, self.table.room(found.start)):
            return None
        return found

    def _ask_again(self, found: Found, *, output_all: bool, after: AfterStep | None) -> None:
        """Read the end of a prompt that has been read from here before, as it was then: where everything lay, and who
        stays. The text is then what it was when its answer began.
        """
        assert self.scoring is not None
        with self.salvage.told():
            self.checkpoints.before_step(self.length, wanted=True)
        self.ranking, self.rebuild = found.table.scores, found.rebuild
        self.evaluate(found.tokens, EVERY if output_all else LAST, after, places=found.table)
        self.ranking, self.rebuild = found.ranking, found.due
        self.scoring.findings.keep(found)
