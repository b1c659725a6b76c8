"""RULER's thirteen tasks (arXiv:2404.06654), made of real text: the same arguments give the same samples.

Names, kinds of needles, numbers of needles, hops and words, lengths and examples are those of RULER's configuration
(github.com/NVIDIA/RULER, scripts/synthetic.yaml). The needle is the sentence of the paper. The questions around it are
in our words, essays are the text at hand, and the two `qa` tasks ask for facts that are put into its passages: SQuAD
and HotpotQA are not in them.
"""

from __future__ import annotations

import math
import random
import re
import string
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle, islice

from kvflash_ggml.errors import ConfigError

from .forms import CHOOSE, CONFIRM
from .graded import Sample
from .tasks_whole import COLOURS, PEOPLE, TOWNS

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
DEPTHS = 40
"""Places in an essay at which a needle can stand."""

SHORT = 4096
"""Below so many tokens, lists of common words are shorter."""

COMMON, FREQUENT, HOPS = 10, 3, 4
"""Words that cwe and fwe ask for, and assignments from the first variable of vt to its last."""

SENTENCE_WORDS, PASSAGE_WORDS = 40, 80
"""Longest sentence of an essay, and shortest document of qa."""

PETS = ("tortoise", "hamster", "parrot", "donkey", "ferret")
TOOLS = ("cello", "trumpet", "harp", "bassoon", "mandolin")
CHAINS = (
    (
        "The wooden heron in the hall was carved by {who}.",
        "{who} spent a long childhood in {what}.",
        "In which town did the carver of the wooden heron in the hall spend a childhood?",
        TOWNS,
    ),
    (
        "The ferry to Sorrel Island belongs to {who}.",
        "The front door of {who} is painted {what}.",
        "Which colour has the front door of the owner of the ferry to Sorrel Island?",
        COLOURS,
    ),
    (
        "The bridge over the Lenne was designed by {who}.",
        "At home {who} keeps a {what}.",
        "Which animal does the designer of the bridge over the Lenne keep at home?",
        PETS,
    ),
    (
        "The speech at the spring fair was given by {who}.",
        "Every evening {who} practises the {what}.",
        "Which instrument does the person who gave the speech at the spring fair practise?",
        TOOLS,
    ),
)
"""Of qa_2: who did it, what is true of that person, the question, and its possible answers."""


@dataclass(frozen=True)
class Source:
    """What samples are made of. text: real prose. count: tokens of a text."""

    text: str
    count: Callable[[str], int]

    @cached_property
    def words(self) -> list[str]:
        """Lower-case words of the text, each once."""
        found = sorted(set(re.findall(r"\b[a-z]{4,9}\b(?!')", self.text)))
        if len(found) < 2 * COMMON:
            raise ConfigError(f"the text has {len(found)} words of 4 to 9 letters: give a longer one with --text")
        return found

    @cached_property
    def sentences(self) -> list[str]:
        """The text in sentences, the longest ones in parts."""
        parts = (one.split() for one in re.split(r"(?<=[.!?])\s+", " ".join(self.text.split())))
        return [" ".join(one[i : i + SENTENCE_WORDS]) for one in parts for i in range(0, len(one), SENTENCE_WORDS)]

    @cached_property
    def passages(self) -> list[str]:
        """Paragraphs of the text, short ones joined."""
        found, words = [""], 0
        for paragraph in re.split(r"\n\s*\n", self.text):
            found[-1] = f"{found[-1]}\n{paragraph.strip()}".strip()
            words += len(paragraph.split())
            if words >= PASSAGE_WORDS:
                found.append("")
                words = 0
        return [one for one in found if one]


def make(task: str, source: Source, *, n_tokens: int, seed: int, index: int, frame: int = 0) -> Sample:
    """Return sample `index` of a task: with its answer and `frame` more tokens it takes at most `n_tokens`.

    ConfigError for an unknown task, or a length that is too short for it.
    """
    if task not in TASKS:
        raise ConfigError(f"there is no task {task!r}: use some of {', '.join(TASKS)}")
    maker, most = TASKS[task]
    room = n_tokens - frame - most

    def draw(units: int) -> Sample:
        rng = random.Random(f"{task} {seed} {index}")
        body, lead, answers, gold = maker(source, rng, units, n_tokens)
        return Sample(task=task, index=index, body=body, lead=lead, answers=tuple(answers), most=most, gold=tuple(gold))

    return _longest(draw, lambda sample: source.count(sample.body + sample.lead), room, what=f"{n_tokens} of {task}")


def match_all(reply: str, answers: Sequence[str]) -> float:
    """RULER's string_match_all for one reply: the share of the answers that it holds, 0 to 1, in any case."""
    return sum(answer.lower() in reply.lower() for answer in answers) / len(answers)


def match_part(reply: str, answers: Sequence[str]) -> float:
    """RULER's string_match_part for one reply: 1 if it holds any of the answers."""
    return float(any(answer.lower() in reply.lower() for answer in answers))


def score(task: str, reply: str, answers: Sequence[str]) -> float:
    """Return how right a reply is, 0 to 1, by the measure that RULER has for the task."""
    return (match_part if task.startswith("qa") else match_all)(reply, answers)


def _longest(make: Callable[[int], Sample], size: Callable[[Sample], int], room: int, *, what: str) -> Sample:
    """Return `make(n)` of the largest n whose size is at most `room`. ConfigError if not even n = 1 is."""
    best = make(1)
    base = size(best)
    if base > room:
        raise ConfigError(f"{what}: the shortest sample takes {base} tokens of {room}: ask for a longer context")
    low, high, n = 1, None, 16
    while high is None or high - low > 1:
        sample = make(n)
        used = size(sample)
        if used <= room:
            low, best = n, sample
        else:
            high = n
        guess = n + int((room - used) * (n - 1) / max(1, used - base))
        n = max(low + 1, min(guess, 4 * n) if high is None else min(guess, high - 1))
    return best


# --- retrieval

Made = tuple[str, str, Sequence[str], Sequence[str]]
"""Body, lead, answers and gold."""

Maker = Callable[[Source, random.Random, int, int], Made]
"""Of a source, a generator of random numbers, units of filler, and the tokens of the whole."""


def _value(kind: str, rng: random.Random, source: Source) -> str:
    if kind == "numbers":
        return str(rng.randrange(10**6, 10**7))
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return "-".join(rng.sample(source.words, 2))


def _niah(
    haystack: str, *, key: str = "words", value: str = "numbers", keys: int = 1, each: int = 1, asked: int = 1
) -> Maker:
    """Needles in a haystack: "noise", "essay", or other "needles"."""

    def make(source: Source, rng: random.Random, units: int, _n_tokens: int) -> Made:
        names = _several(rng, keys, lambda: _value(key, rng, source))
        found = {name: _several(rng, each, lambda: _value(value, rng, source)) for name in names}
        needles = [NEEDLE.format(kind=value, key=name, value=one) for name in names for one in found[name]]
        wanted = rng.sample(names, asked)
        gold = [NEEDLE.format(kind=value, key=name, value=one) for name in wanted for one in found[name]]
        rng.shuffle(needles)
        if haystack == "essay":
            depths = [place / (DEPTHS - 1) for place in rng.sample(range(DEPTHS), len(needles))]
        else:
            depths = [rng.random() for _ in needles]
        filler = _filler(haystack, source, rng, units, lambda: NEEDLE.format(
            kind=value, key=_value(key, rng, source), value=_value(value, rng, source)
        ))  # fmt: skip
        text = (" " if haystack == "essay" else "\n").join(_insert(filler, depths, needles))
        one = asked * each == 1
        kind, are = (value[:-1], "is") if one else (value, "are")
        which = wanted[0] if asked == 1 else f"{', '.join(wanted[:-1])} and {wanted[-1]}"
        hidden, them = (f"A special magic {kind} is", "it") if one else (f"Some special magic {kind} are", "them")
        what = f"{'What is' if one else 'What are all'} the special magic {kind} for {which}"
        body = (
            f"{hidden} hidden in the text that follows. Remember the {kind}: I will ask for {them} later.\n{text}\n"
            f"{what} that the text mentions?"
        )
        lead = f"The special magic {kind} for {which} that the text mentions {are}"
        return body, lead, [one for name in wanted for one in found[name]], gold

    return make


def _filler(kind: str, source: Source, rng: random.Random, units: int, needle: Callable[[], str]) -> list[str]:
    if kind == "noise":
        return [NOISE] * units
    if kind == "essay":
        return _read_on(source.sentences, rng, units)
    return [needle() for _ in range(units)]


def _read_on(parts: Sequence[str], rng: random.Random, units: int) -> list[str]:
    """So many parts from a random one on, and from the first again."""
    first = rng.randrange(len(parts))
    return list(islice(cycle(parts), first, first + units))


def _insert(filler: Sequence[str], depths: Sequence[float], lines: Sequence[str]) -> Iterator[str]:
    """The filler with lines at their depths, 0 to 1."""
    placed = sorted(zip((round(depth * len(filler)) for depth in depths), lines, strict=True), key=lambda one: one[0])
    at = 0
    for place, line in placed:
        yield from filler[at:place]
        yield line
        at = place
    yield from filler[at:]


def _several(rng: random.Random, count: int, draw: Callable[[], str]) -> list[str]:
    """So many different ones, in the order of their drawing."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw()] = None
    return list(found)


# --- tracing


def _vt(_source: Source, rng: random.Random, units: int, n_tokens: int) -> Made:
    """A number that five variables are given one from the other, after an example of the same."""
    example, answer, names, _ = _chain(rng, 5 if n_tokens >= SHORT else 2, letters=3)
    body, lead, names_asked, lines = _chain(rng, units, letters=5)
    return f"{example}\n{answer} {' '.join(names)}\n\n{body}", lead, names_asked, lines


def _chain(rng: random.Random, units: int, *, letters: int) -> Made:
    names = _several(rng, HOPS + 1, lambda: "".join(rng.choices(string.ascii_uppercase, k=letters)))
    value = str(rng.randrange(10**4, 10**5))
    lines = [
        f"VAR {name} = {before}" for name, before in zip(names, [value, *(f"VAR {n}" for n in names)], strict=False)
    ]
    depths = sorted(rng.random() for _ in lines)
    text = "\n".join(_insert([NOISE] * units, depths, lines))
    body = (
        f"Follow the assignments of variables that are hidden in the text below.\n\n{text}\n"
        f"Question: Which variables have the value {value} in the text above?"
    )
    lead = f"Answer: By the assignments in the text above, {len(names)} variables have the value {value}:"
    return body, lead, names, lines


# --- aggregation


def _cwe(source: Source, rng: random.Random, units: int, n_tokens: int) -> Made:
    """Ten words that a numbered list has more often than others, after an example."""
    short = n_tokens < SHORT
    example, lead, common, _ = _list(
        source, rng, 10 if short else 30, often=3 if short else 10, seldom=1 if short else 3
    )
    body, _, answers, _ = _list(source, rng, units, often=6 if short else 30, seldom=1 if short else 3)
    numbered = " ".join(f"{i}. {word}" for i, word in enumerate(common, 1))
    return f"{example}\n{lead} {numbered}\n{body}", lead, answers, ()


def _list(source: Source, rng: random.Random, others: int, *, often: int, seldom: int) -> Made:
    picked = _stock(source, rng, COMMON + others)
    words = picked[:COMMON] * often + picked[COMMON:] * seldom
    rng.shuffle(words)
    text = " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))
    body = (
        "Some words of the numbered list below appear more often than others. Remember those that appear most often.\n"
        f"{text}\nQuestion: Which {COMMON} words appear most often in the list above?"
    )
    return body, f"Answer: The {COMMON} words that appear most often in the list are:", picked[:COMMON], ()


def _stock(source: Source, rng: random.Random, count: int) -> list[str]:
    """So many different words; where the text has no more, compounds of two."""
    if count <= len(source.words):
        return rng.sample(source.words, count)
    words = rng.sample(source.words, len(source.words))
    return words + _several(rng, count - len(words), lambda: "".join(rng.sample(words, 2)))


def _fwe(_source: Source, rng: random.Random, units: int, n_tokens: int) -> Made:
    """Three coded words that come most often, by the zeta distribution with alpha 2; dots come more often still."""
    coded = ["....", *_several(rng, max(n_tokens // 50, 8), lambda: "".join(rng.choices(string.ascii_lowercase, k=6)))]
    share = 6 / math.pi**2
    words = [word for rank, word in enumerate(coded, 1) for _ in range(int(10 * units * share / rank**2))]
    rng.shuffle(words)
    body = (
        "Read the coded text that follows, and count each coded word. Find the three coded words that come most often. "
        f"{' '.join(words)}\nQuestion: Which three words come most often in the coded text above? Leave out the dots "
        "'....', and explain nothing."
    )
    lead = "Answer: In the coded text above, the three words that come most often are:"
    return body, lead, coded[1 : 1 + FREQUENT], ()


# --- questions over documents


def _qa_1(source: Source, rng: random.Random, units: int, _n_tokens: int) -> Made:
    """A fact in one of many documents; others hold other facts."""
    forms = [*CHOOSE, *CONFIRM]
    rng.shuffle(forms)
    lines = [form.sentence.format(v=rng.choice(form.values)) for form in forms]
    value = next(value for value in forms[0].values if forms[0].sentence.format(v=value) == lines[0])
    return _documents(source, rng, units, lines, question=forms[0].reworded, answer=value, gold=lines[:1])


def _qa_2(source: Source, rng: random.Random, units: int, _n_tokens: int) -> Made:
    """A fact about somebody, whom another document names; others hold such facts about other people."""
    people, chains = iter(rng.sample(PEOPLE, len(PEOPLE))), rng.sample(CHAINS, len(CHAINS))
    lines, answer = [], ""
    for first, second, _, values in chains:
        who, other = next(people), next(people)
        what, wrong = rng.sample(values, 2)
        answer = answer or what
        lines += [first.format(who=who), second.format(who=who, what=what), second.format(who=other, what=wrong)]
    return _documents(source, rng, units, lines, question=chains[0][2], answer=answer, gold=lines[:2])


def _documents(
    source: Source,
    rng: random.Random,
    units: int,
    lines: Sequence[str],
    *,
    question: str,
    answer: str,
    gold: Sequence[str],
) -> Made:
    """Passages in a random order, into each of which at most one line is put: first of all the gold ones."""
    count = units + len(gold) - 1
    passages = _read_on(source.passages, rng, count)
    for at, line in enumerate(lines[:count]):
        before, end, after = passages[at].partition("\n")
        passages[at] = f"{before}\n{line}{end}{after}"
    rng.shuffle(passages)
    text = "\n\n".join(f"Document {i}:\n{passage}" for i, passage in enumerate(passages, 1))
    ask = "Answer the question by the documents. Write only the answer."
    body = f"{ask}\n\nThese are the documents.\n\n{text}\n\n{ask}\n\nQuestion: {question}"
    return body, "Answer:", (answer,), gold


TASKS: dict[str, tuple[Maker, int]] = {
    "niah_single_1": (_niah("noise"), 128),
    "niah_single_2": (_niah("essay"), 128),
    "niah_single_3": (_niah("essay", value="uuids"), 128),
    "niah_multikey_1": (_niah("essay", keys=4), 128),
    "niah_multikey_2": (_niah("needles"), 128),
    "niah_multikey_3": (_niah("needles", key="uuids", value="uuids"), 128),
    "niah_multivalue": (_niah("essay", each=4), 128),
    "niah_multiquery": (_niah("essay", keys=4, asked=4), 128),
    "vt": (_vt, 30),
    "cwe": (_cwe, 120),
    "fwe": (_fwe, 50),
    "qa_1": (_qa_1, 32),
    "qa_2": (_qa_2, 32),
}
"""RULER's tasks in its order, each with the tokens that an answer may take."""

WHOLE = ("cwe", "fwe")
"""Tasks that need all of the text at once."""
