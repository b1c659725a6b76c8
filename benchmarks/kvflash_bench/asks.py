"""What every recall task is made of: a document, what is asked about it, and what both are made from."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from .answers import finished, judge
from .tasks import NOUNS, WORDS, Needle, Tokenize, compose, unused_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What is asked after a document. tail: the question and the beginning of its answer. label: its row of results.

    said: how the answer goes on before it is judged, whatever the model would say. goes_on: the answer to the question
    before goes on with it: nothing is read again or restored between them. gold: token spans [first, end) of the
    document that hold the answer; empty where all of it is needed.
    """

    tail: str
    answer: str
    label: str
    gold: tuple[tuple[int, int], ...] = ()
    said: str = ""
    goes_on: bool = False

    def is_correct(self, reply: str) -> bool:
        """Whether the first number, or the first word where no number is asked for, is the answer."""
        found = self._find(reply)
        return found is not None and found.group().lower() == self.answer

    def is_settled(self, reply: str) -> bool:
        """Whether nothing that follows could change what `is_correct` says."""
        found = self._find(reply)
        return found is not None and found.end() < len(reply)

    def _find(self, reply: str) -> re.Match[str] | None:
        return re.search(r"\d+" if self.answer.isdigit() else r"\w+", reply)


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeAsk(Ask):
    """A question that is answered in a sentence of the model's own. anchors: wrong answers of the same kind."""

    anchors: tuple[str, ...]

    def is_correct(self, reply: str) -> bool:
        """Whether the reply names the answer, and nothing else of its kind before."""
        return judge(reply, self.answer, self.anchors) is True

    def is_settled(self, reply: str) -> bool:
        return judge(finished(reply), self.answer, self.anchors) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What stands around a document and a question that is answered freely; by default what suits any model.

    special: it holds special tokens. size: tokens of `before_document`.
    """

    before_document: str = ""
    before_answer: str = "\nAnswer: "
    special: bool = False
    size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A document and the questions about it. special: the text holds special tokens."""

    document: str
    asks: tuple[Ask, ...]
    special: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """What every kind is made from.

    depths: 0..1, of the facts that are asked for. frame and fact_set: of questions that are answered freely. seed: of
    the trial.
    """

    text: str
    tokenize: Tokenize
    n_tokens: int
    depths: tuple[float, ...]
    frame: Frame = Frame()
    fact_set: str = "choose"
    seed: int = 0

    def facts(self, rng: random.Random, count: int, *, noun: str | None = None) -> list[Needle]:
        """Facts about one noun, whose names share no word."""
        words = rng.sample(WORDS, 2 * count)
        noun = noun or rng.choice(NOUNS)
        return [
            Needle(noun=noun, name=f"{first} {second}", value=unused_value(self.text, rng))
            for first, second in zip(words[::2], words[1::2], strict=True)
        ]

    def document(self, rng: random.Random, lines: Sequence[tuple[float, str]], *, n_tokens: int | None = None) -> str:
        """Filler with the lines at their depths."""
        return compose(
            self.text, self.tokenize, lines=lines, n_tokens=n_tokens or self.n_tokens, start=rng.random()
        )  # fmt: skip

    def span(self, document: str, line: str, part: str = "", *, shift: int = 0) -> tuple[int, int]:
        """The tokens of a line of the document, or of a part of that line. shift: tokens before the document."""
        at = document.index(line + "\n") + line.index(part)
        before, whole = (self.tokenize(document[:to]) for to in (at, at + len(part or line)))
        # not simply len(before): in most vocabularies the token of a word begins with the space before it
        first = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before))
        return shift + first, shift + len(whole)
