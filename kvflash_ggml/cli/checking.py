"""What `kvflash-run check` measures: how long a text the time allows, speeds at three depths, answers to questions."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..calibration import documents
from ..constants import CHUNK
from ..errors import ConfigError
from ..native import vocabulary
from .model import has_chat_template
from .terminal import ReadingTime

if TYPE_CHECKING:
    from ..llama.llama import Llama

LENGTHS = (65536, 32768, 16384, 8192, 4096, 2048, 1024)
"""Tokens of the text that is read, the longest one that the time and the model allow."""

DEPTHS = (4, 2, 1)
"""Speeds are measured after these parts of the text: a quarter, a half and all of it."""

STEPS = 16
"""Tokens of an answer whose time is taken."""

ANSWER, QUESTION, QUESTIONS = 24, 32, 24
"""Most tokens of an answer, roughly the tokens of a question, and how many are asked."""

ROOM = 256
"""Tokens of the context beside the text."""

PROBE, PROBE_SECONDS = 1536, 5.0
"""Tokens that are read to see how fast this machine is, and the seconds after which it has seen enough."""

CALIBRATION = 6144
"""Tokens that are read to find the retrieval heads, roughly."""

SURE = 0.7
"""Share of the time that is planned with: speeds of a first look are not exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpeed:
    """What one cache did at one depth, in tokens: tokens a second, reading and then answering."""

    depth: int
    read: float
    decode: float


@dataclass(slots=True, kw_only=True)
class Arm:
    """What one cache did. pool: tokens, None for the full cache. right: whether each question was answered right.

    memory: bytes that the driver, or the system of the process, says it has taken. pages: of these, page images in host
    memory. logits: after the last token of each depth.
    """

    pool: int | None
    speeds: list[CacheSpeed] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    memory: int = 0
    pages: int = 0
    logits: list[Any] = field(default_factory=list)


# --- how long a text the time allows


@dataclass(slots=True, kw_only=True)
class MachinePace:
    """How fast this machine is. reading: the time of tokens. step: seconds of one token of a short text's answer."""

    reading: ReadingTime = field(default_factory=ReadingTime)
    step: float = 0.0

    def seconds(self, length: int, *, calibrates: bool) -> float:
        """Return how long a check with a text of `length` tokens takes, roughly."""
        seen = self.reading.seconds(length + CHUNK) - self.reading.seconds(length) - self.reading.seconds(CHUNK)
        step = self.step + max(0.0, seen / CHUNK)
        ask = QUESTION * (self.reading.seconds(CHUNK) + max(0.0, seen)) / CHUNK + ANSWER / 2 * step
        heads = self.reading.seconds(CALIBRATION // 2) * 2 if calibrates else 0.0
        return 2 * (self.reading.seconds(length) + QUESTIONS * ask + len(DEPTHS) * STEPS * step) + heads


def lengths(pace: MachinePace, seconds: float, *, most: int, calibrates: bool) -> list[int]:
    """Return the lengths that can be tried, the best one first: what the time allows, and shorter ones.

    most: tokens that the model was trained for, and the shortest length is tried whatever the time.
    """
    fits = [n for n in LENGTHS if n + ROOM <= most]
    in_time = [n for n in fits if pace.seconds(n, calibrates=calibrates) <= seconds * SURE]
    if not fits:
        least = LENGTHS[-1] + ROOM
        raise ConfigError(f"this model was trained for {most} tokens, and a check takes {least}: use another model")
    return in_time or fits[-1:]


# --- measuring


@dataclass(frozen=True, slots=True, kw_only=True)
class FactText:
    """The tokens of a text with facts in it, and of each question with the value that answers it."""

    tokens: list[int]
    asks: list[tuple[list[int], str]]


def compose(llm: Llama, length: int) -> FactText:
    """Return a text of about `length` tokens with its questions, in the model's chat template if it has one."""

    def tokenize(text: str) -> list[int]:
        return list(llm.tokenize(text.encode(), add_bos=False, special=False))

    before, after = _frame(llm)
    made = documents.compose(tokenize, n_tokens=length, seed=1)
    opening = list(llm.tokenize(before.encode(), add_bos=not _begins_with_bos(llm, before), special=True))
    tokens = (opening + made.tokens.tolist())[: length + ROOM // 4]
    asks = []
    for fact, _ in made.facts:
        for words in (fact.verbatim, fact.reworded):
            asked = tokenize(documents.question(words) if after is None else f"\n\nQuestion: {words}")
            end = [] if after is None else list(llm.tokenize(after.encode(), add_bos=False, special=True))
            asks.append((asked + end, fact.value))
    return FactText(tokens=tokens, asks=asks)


_MARK = "KVFLASH TEXT"


def _frame(llm: Llama) -> tuple[str, str | None]:
    """What the chat template puts before and after a message. After is None without a template that can be used."""
    if not has_chat_template(llm):
        return "", None
    from ..chat.templates import ChatTemplate
    from ..chat.values import ChatInput

    vocab = vocabulary.of(llm.model)
    bos, eos = (vocabulary.name(vocab, token) for token in (llm.token_bos(), llm.token_eos()))
    asked = ChatInput(messages=[{"role": "user", "content": _MARK}], enable_thinking=False)
    try:
        prompt = ChatTemplate(llm.metadata["tokenizer.chat_template"], bos=bos, eos=eos).render(asked).prompt
    except (ConfigError, KeyError):
        return "", None
    before, mark, after = prompt.partition(_MARK)
    return (before, after) if mark else ("", None)


def _begins_with_bos(llm: Llama, text: str) -> bool:
    bos = vocabulary.name(vocabulary.of(llm.model), llm.token_bos())
    return bool(bos) and text.startswith(bos)


def is_right(reply: str, value: str) -> bool:
    """Whether the reply has the value as a word, in any case."""
    return re.search(rf"\b{re.escape(value)}\b", reply, re.IGNORECASE) is not None


def measure(llm: Llama, text: FactText, length: int, *, more: Callable[[int], bool], taken: Callable[[], int]) -> Arm:
    """Read the text, answer at each depth and answer the questions.

    more: called with the number of questions that were asked, to see whether another one is. taken: bytes of memory
    that are taken now.
    """
    arm = Arm(pool=None if llm.kvflash is None else llm.kvflash.pool)
    done = 0
    for part in DEPTHS:
        depth = len(text.tokens) if part == 1 else length // part // CHUNK * CHUNK
        began = time.perf_counter()
        with closing(llm.generate(text.tokens[:depth], temp=0.0)) as stream:
            next(stream)
            read = time.perf_counter()
            arm.logits.append(llm.newest_logits())
            next(stream)  # the first step after a prompt may build a graph, and pages in what the prompt has asked for
            warm = time.perf_counter()
            for _ in range(STEPS):
                next(stream)
        rate = STEPS / (time.perf_counter() - warm)
        arm.speeds.append(CacheSpeed(depth=depth, read=(depth - done) / (read - began), decode=rate))
        arm.memory = max(arm.memory, taken())
        done = depth
    for asked, value in text.asks:
        if not more(len(arm.right)):
            break
        arm.right.append(is_right(_reply(llm, text.tokens + asked, value), value))
        arm.memory = max(arm.memory, taken())
    arm.pages = 0 if llm.kvflash is None else llm.kvflash.host_bytes
    return arm


def _reply(llm: Llama, prompt: list[int], value: str) -> str:
    """Return a greedy answer, up to where it has the value or ends."""
    vocab = vocabulary.of(llm.model)
    ids: list[int] = []
    reply = ""
    with closing(llm.generate(prompt, temp=0.0)) as stream:
        for token in stream:
            if vocabulary.is_end(vocab, token):
                break
            ids.append(token)
            reply = llm.detokenize(ids).decode("utf-8", "replace")
            if len(ids) == ANSWER or is_right(reply, value):
                break
    return reply


def pace_of(llm: Llama) -> MachinePace:
    """Read a short text and answer, to see how fast this machine is."""
    pace, text = MachinePace(), compose(llm, PROBE).tokens
    began = time.perf_counter()
    for done in range(CHUNK, PROBE + 1, CHUNK):
        llm.eval(text[done - CHUNK : done])
        llm.newest_logits()  # waits for the device
        pace.reading.add(done, time.perf_counter() - began)
        if time.perf_counter() - began > PROBE_SECONDS:
            break
    began = time.perf_counter()
    for token in text[done : done + 4]:
        llm.eval([token])
        llm.newest_logits()
    pace.step = (time.perf_counter() - began) / 4
    return pace
