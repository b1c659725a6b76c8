"""Recall tasks: a fact hidden in real text, and a question in words the test models know.

The task is the needle in a haystack of Kamradt (2023) and RULER (arXiv:2404.06654). The wording is
that of `scripts/train_recall/templates.py`: the models of `tests/models` answer no other.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvflash_ggml.errors import ConfigError

Tokenize = Callable[[str], Sequence[int]]

NOUNS = ("access code", "pass key", "magic number", "secret number", "vault code", "serial number")
_WORDS = """
    amber falcon copper meadow velvet harbor crimson glacier hollow lantern marble orchid quiet
    summit rustic beacon silver thicket solar canyon timber willow urban cobalt wintry pebble young
    juniper bright anchor gentle badger frozen cactus golden donkey humble engine ivory feather
    jolly garden little hammer mellow island narrow kettle orange ladder purple mirror rapid needle
    sturdy oyster tender pillow violet rabbit wooden saddle yellow tunnel
"""
WORDS = tuple(_WORDS.split())
MAX_DISTRACTORS = len(WORDS) // 2 - 1
PLACES = 8  # to begin to read from, so many lines apart, until one gives the exact length
STRIDE = 16
ROUNDS = 8  # until the length is nearly right
CUTS = 32  # of the first lines that are then tried
SPREAD = (5**0.5 - 1) / 2  # of the text between the beginnings of successive documents: they stay apart for long


@dataclass(frozen=True, slots=True, kw_only=True)
class Needle:
    """A fact. value: seven digits."""

    noun: str
    name: str
    value: str

    @property
    def sentence(self) -> str:
        """What stands in the document."""
        return f"The {self.noun} for {self.name} is {self.value}."

    @property
    def question(self) -> str:
        """What is asked."""
        return f"What is the {self.noun} for {self.name}?"

    @property
    def lead(self) -> str:
        """The answer up to its value, without the space before it."""
        return f"The {self.noun} for {self.name} is"


ZEBRA = Needle(noun="access code", name="amber zebra", value="9274015")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A document of exactly `n_tokens` tokens and what to ask about it.

    position: the token at which the needle's sentence begins. distractors: facts of the same kind
    that also stand in the document; their names share no word with the needle's.
    """

    document: str
    needle: Needle
    n_tokens: int
    position: int
    distractors: tuple[Needle, ...] = ()

    @property
    def question(self) -> str:
        """What is asked."""
        return self.needle.question

    @property
    def answer(self) -> str:
        """The digits."""
        return self.needle.value

    @property
    def prompt(self) -> str:
        """The document, the question and the beginning of the answer, for plain completion."""
        return f"{self.document}\n{self.question} {self.needle.lead}"

    @property
    def messages(self) -> list[dict[str, str]]:
        """One user message with the document and the question, for `create_chat_completion`."""
        return [{"role": "user", "content": f"{self.document}\n{self.question}"}]

    @property
    def chatml(self) -> str:
        """The same message in ChatML, for plain completion; to be tokenized with `special=True`."""
        content = self.messages[0]["content"]
        return f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"

    def is_correct(self, reply: str) -> bool:
        """Whether the first number of the reply is the answer, digit for digit."""
        number = re.search(r"\d+", reply)
        return number is not None and number.group() == self.answer


def needle_task(
    text: str, tokenize: Tokenize, *, n_tokens: int, depth: float, seed: int, n_distractors: int = 0
) -> Task:
    """A random needle at `depth` (0: first line, 1: last) of a document of `n_tokens` tokens.

    text: filler, read from a random line on and from its start again where it is too short.
    tokenize: text to token ids, without a bos token. The length is exact; the question is not
    counted. The same arguments give the same task.

    Raises ConfigError for a depth outside 0..1, too many distractors, or a document too short for
    its facts.
    """
    if not 0 <= n_distractors <= MAX_DISTRACTORS:
        raise ConfigError(
            f"n_distractors is {n_distractors}; ask for 0 to {MAX_DISTRACTORS}, so that no two names share a word"
        )
    rng = random.Random(seed)
    words = rng.sample(WORDS, 2 * n_distractors + 2)
    noun = rng.choice(NOUNS)
    needle, *others = (
        Needle(noun=noun, name=f"{first} {second}", value=unused_value(text, rng))
        for first, second in zip(words[::2], words[1::2], strict=True)
    )
    events = [(depth, needle), *((rng.random(), other) for other in others)]
    return bury(text, tokenize, needles=events, n_tokens=n_tokens, start=rng.random())


def zebra_task(text: str, tokenize: Tokenize, *, n_tokens: int, depth: float = 0.0) -> Task:
    """The task of the demo: always the same needle, by default in the first line of the text."""
    return bury(text, tokenize, needles=[(depth, ZEBRA)], n_tokens=n_tokens)


def bury(
    text: str,
    tokenize: Tokenize,
    *,
    needles: Sequence[tuple[float, Needle]],
    n_tokens: int,
    start: float = 0.0,
) -> Task:
    """Put (depth, needle) pairs on lines of their own in `n_tokens` tokens of `text`.

    The first pair is the one asked for. start: where in the text to begin to read, 0..1.
    """
    for depth, needle in needles:
        if not 0 <= depth <= 1:
            raise ConfigError(f"depth of {needle.name!r} is {depth}; it must be between 0 and 1")
    lines = [(depth, needle.sentence) for depth, needle in needles]
    document = compose(text, tokenize, lines=lines, n_tokens=n_tokens, start=start)
    target = needles[0][1]
    return Task(
        document=document,
        needle=target,
        n_tokens=n_tokens,
        position=len(tokenize(document[: document.index(target.sentence)])),
        distractors=tuple(needle for _, needle in needles[1:]),
    )


def compose(
    text: str, tokenize: Tokenize, *, lines: Sequence[tuple[float, str]], n_tokens: int, start: float = 0.0
) -> str:
    """Exactly `n_tokens` tokens of `text` with (depth, line) pairs on lines of their own.

    start: where in the text to begin to read, 0..1.
    """
    return _fit(_Filler(text, tokenize, start=start), lines, n_tokens=n_tokens)


class _Filler:
    """Consecutive lines of a text, by their length in tokens."""

    def __init__(self, text: str, tokenize: Tokenize, *, start: float) -> None:
        if not text.strip():
            raise ConfigError("text is empty; it must hold the filler of the document")
        # blank lines stay with the line before: tokens span several newlines, seldom a new line
        units = re.split(r"(?<=\n)(?=[^\n])", text.strip() + "\n")
        first = int(start * len(units))
        self._units = units[first:] + units[:first]
        self._tokenize = tokenize
        self._counts: dict[str, int] = {}

    def length(self, text: str) -> int:
        """Tokens of `text`."""
        return len(self._tokenize(text))

    def count(self, unit: str) -> int:
        """Tokens of a short `unit` on its own, remembered."""
        if unit not in self._counts:
            self._counts[unit] = self.length(unit)
        return self._counts[unit]

    def take(self, room: int, *, skip: int) -> tuple[list[str], list[str]]:
        """`room` tokens: ways to cut the first lines, best first, and the lines after them."""
        units: list[str] = []
        total = 0
        while total < room:
            units.append(self._units[(skip + len(units)) % len(self._units)])
            total += self.count(units[-1])
        excess = total - room
        while units and excess >= self.count(units[0]):
            excess -= self.count(units.pop(0))
        head = "".join(units[:2])
        want = self.count(head) - excess
        cuts = sorted((head[i:] for i in range(len(head) or 1)), key=lambda cut: abs(self.count(cut) - want))
        return cuts, units[2:]


def _fit(filler: _Filler, lines: Sequence[tuple[float, str]], *, n_tokens: int) -> str:
    """The document, `n_tokens` long.

    Tokens at the seams may merge, so the sum of the parts is only a first guess.
    """
    for place in range(PLACES):
        room = n_tokens - sum(filler.count(line + "\n") for _, line in lines)
        for _ in range(ROUNDS):
            if room < 0:
                raise ConfigError(f"{n_tokens} tokens cannot hold {len(lines)} facts; ask for more")
            cuts, rest = filler.take(room, skip=place * STRIDE)
            document = _interleave([cuts[0], *rest], lines, count=filler.count)
            excess = filler.length(document) - n_tokens
            if not excess:
                return document
            room -= excess
        for cut in cuts[:CUTS]:
            document = _interleave([cut, *rest], lines, count=filler.count)
            if filler.length(document) == n_tokens:
                return document
    raise ConfigError(f"no document of exactly {n_tokens} tokens found; try another length")


def _interleave(units: list[str], facts: Sequence[tuple[float, str]], *, count: Callable[[str], int]) -> str:
    """The document: each fact before the line that begins nearest after its depth."""
    starts = list(accumulate((count(unit) for unit in units), initial=0))
    lines = [[unit] for unit in units] + [[]]
    for depth, fact in sorted(facts, key=lambda event: event[0], reverse=True):
        lines[bisect_left(starts, depth * starts[-1])].insert(0, fact + "\n")
    return "".join(line for group in lines for line in group)


def unused_value(text: str, rng: random.Random) -> str:
    """Seven digits that the filler does not hold."""
    while (value := f"{rng.randrange(10**7):07d}") in text:
        pass
    return value
