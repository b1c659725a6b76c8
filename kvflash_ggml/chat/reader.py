"""Reads one answer while it is written: content, reasoning and function calls. No text is lost."""

from __future__ import annotations

import itertools
import json
import logging
import re
import secrets
import string
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from .values import Call, Delta, Grammar, Said

logger = logging.getLogger("kvflash_ggml")

PAUSE_S = 0.05
"""Seconds between two readings of an answer; it is ten times as long as a reading takes, if that is more."""

PATIENCE = 3
"""Readings in a row that may fail: a parser may understand more text that it did not understand before."""

_UNSURE = '"}] \n\r\t\\'
"""Characters that a parser may have added to incomplete arguments, or may still change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """A call of a function, as a parser reads it. closed: no more text can belong to it."""

    name: str
    arguments: str
    id: str = ""
    closed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """What a parser makes of an answer, or of its beginning.

    read: bytes up to the end of the last part that it has. plain: bytes up to the first call that is not closed. first:
    bytes up to the first call.
    """

    content: str = ""
    reasoning: str = ""
    calls: tuple[ParsedCall, ...] = ()
    read: int = 0
    plain: int = 0
    first: int = 0


Parse = Callable[[str], "Parsed | None"]
"""Parses a text from its beginning; returns None if no answer begins so."""


class AnswerReader:
    """Reads one answer, on one thread at a time. No call raises for anything that a model may write.

    parse: None for content alone. marks: words of the format, which are no part of an answer. fixed: texts of the
    format, as "</tool_call>". odd: text that no parser
    understood has become content; the answer ends by "stop" then, not by its calls.
    """

    def __init__(
        self,
        parse: Parse | None = None,
        *,
        marks: frozenset[str] = frozenset(),
        fixed: frozenset[str] = frozenset(),
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._parse = parse
        self._marks = marks
        self._fixed = fixed
        self._clock = clock or time.monotonic
        self._text = ""
        self._understood = self._failures = 0
        self._next = float("-inf")
        self._calls: list[Call] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self.odd = False
        base = None if parse is None else parse("")
        self._sent = {"content": base.content if base else "", "reasoning": base.reasoning if base else ""}

    @property
    def called(self) -> bool:
        """Whether the answer ends by its calls. It does not where other text is behind or within them."""
        return bool(self._calls) and not self.odd

    @property
    def said(self) -> Said:
        """The sum of all deltas so far: at the end, the whole answer."""
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        return Said(content=content, reasoning=reasoning, calls=tuple(self._calls))

    def push(self, text: str, *, end: bool = False, stopped: bool = False) -> list[Delta]:
        """Take more text of the answer, and return what that adds to it.

        end: this text, which may be empty, is the last. stopped: the answer ends at a stop string or by itself, not at
        a limit. A call that is cut off there is content, if no part of it was returned before.
        """
        self._text += text
        if self._parse is None or self.odd:
            return list(self._more_content(text))
        began = self._clock()
        if began < self._next and not end:
            return []
        parsed = self._parse(self._text)
        now = self._clock()
        self._next = now + max(PAUSE_S, 10 * (now - began))
        if parsed is not None:
            self._understood, self._failures = len(self._text), 0
            return list(self._end(parsed, stopped=stopped) if end else self._take(parsed))
        self._failures += 1
        return list(self._give_up()) if end or self._failures == PATIENCE else []

    # --- what is understood

    def _take(self, parsed: Parsed, *, all_: bool = False) -> Iterator[Delta]:
        """Yield what was added. all_: incomplete arguments too."""
        yield from self._grown("reasoning", parsed.reasoning)
        yield from self._grown("content", parsed.content)
        for i, call in enumerate(parsed.calls):
            if call.closed and _texts(call.arguments) is None:  # it will be content
                break
            whole = call.closed or all_
            arguments = call.arguments if whole else call.arguments.rstrip(_UNSURE)
            if i == len(self._calls):
                if not whole and len(arguments) < 2:  # its name may grow
                    break
                self._calls.append(Call(id=call.id or _made_id(), name=call.name, arguments=arguments))
                made = self._calls[i]
                yield Delta(index=i, id=made.id, name=made.name, arguments=arguments)
            elif len(arguments) > len(sent := self._calls[i].arguments) and arguments.startswith(sent):
                self._calls[i] = Call(id=self._calls[i].id, name=self._calls[i].name, arguments=arguments)
                yield Delta(index=i, arguments=arguments[len(sent) :])

    def _grown(self, kind: str, text: str) -> Iterator[Delta]:
        sent = self._sent[kind]
        if len(text) > len(sent) and text.startswith(sent):
            more = text[len(sent) :]
            self._sent[kind] = text
            (self._content if kind == "content" else self._reasoning).append(more)
            yield Delta(content=more) if kind == "content" else Delta(reasoning=more)

    def _more_content(self, text: str) -> Iterator[Delta]:
        if text:
            self._content.append(text)
            yield Delta(content=text)

    # --- what is not

    def _end(self, parsed: Parsed, *, stopped: bool) -> Iterator[Delta]:
        """End an answer that was understood, or may be the beginning of one."""
        whole = tuple(itertools.takewhile(_complete, parsed.calls))
        if stopped and len(whole) < len(parsed.calls):
            if len(self._calls) <= len(whole):
                yield from self._settle(replace(parsed, calls=whole), self._from(parsed.plain))
                return
            self.odd = True
        rest = self._from(parsed.read)
        if parsed.calls and not stopped and self._ends_in_a_mark(rest):
            self._text, rest = self._text.removesuffix(rest), ""
        yield from self._settle(parsed, rest if rest.strip() else "")

    def _ends_in_a_mark(self, rest: str) -> bool:
        """Report whether a text consists of fixed texts of the format, the last of which may be cut."""
        while rest := rest.lstrip():
            if any(text.startswith(rest) for text in self._fixed):
                return True
            found = max((text for text in self._fixed if rest.startswith(text)), key=len, default="")
            if not found:
                return False
            rest = rest[len(found) :]
        return True

    def _give_up(self) -> Iterator[Delta]:
        """Make content of all text from where it was not understood any more."""
        assert self._parse is not None
        low, high = self._understood, len(self._text)
        parsed = self._parse(self._text[:low]) or Parsed()
        while high - low > 1:
            middle = (low + high) // 2
            tried = self._parse(self._text[:middle])
            if tried is None:
                high = middle
            else:
                low, parsed = middle, tried
        whole = tuple(itertools.takewhile(lambda call: call.closed, parsed.calls))
        yield from self._settle(replace(parsed, calls=whole), self._from(parsed.plain))

    def _settle(self, parsed: Parsed, rest: str) -> Iterator[Delta]:
        """Yield the answer and the content behind it; where that would lose text, without calls, or as it stands."""
        plain = Parsed(content=parsed.content, reasoning=parsed.reasoning)
        ways = [(parsed, rest), (plain, self._from(parsed.first)), (Parsed(), self._text)]
        parsed, rest = next(((way, rest) for way, rest in ways if not self._lost(way, rest)), ways[-1])
        yield from self._take(parsed, all_=True)
        yield from self._rest(rest)

    def _rest(self, text: str) -> Iterator[Delta]:
        if text:
            self.odd = True
            logger.warning("an answer is not in its model's format: %d characters of it are content", len(text))
            yield from self._more_content(text)

    def _from(self, place: int) -> str:
        return self._text.encode("utf-8", "replace")[place:].decode("utf-8", "replace")

    def _lost(self, parsed: Parsed, rest: str) -> bool:
        """Report whether a word of the text is in no part of this answer, or other text was returned before."""
        if rest != self._text:
            pairs = [(sent.name, sent.arguments, call) for sent, call in zip(self._calls, parsed.calls, strict=False)]
            if any(name != call.name or not call.arguments.startswith(part) for name, part, call in pairs):
                return True
            for kind, text in (("content", parsed.content), ("reasoning", parsed.reasoning)):
                if not text.startswith(self._sent[kind]) and not self._sent[kind].startswith(text):
                    return True
        parts = [parsed.content, parsed.reasoning, rest]
        for call in parsed.calls:
            texts = _texts(call.arguments)
            if texts is None and call.closed:
                return True
            parts += [call.name, call.id, call.arguments, *(texts or ())]
        return not words(self._text) <= words("\n".join(parts)) | self._marks


def _complete(call: ParsedCall) -> bool:
    return call.closed or _texts(call.arguments) is not None


def _made_id() -> str:
    """Return nine letters and digits, the form that Mistral's templates insist on."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


_WORD = re.compile(r"\w+")


def words(text: str) -> frozenset[str]:
    """Return the words and numbers of a text, in lower case."""
    return frozenset(_WORD.findall(text.casefold()))


def _texts(arguments: str) -> list[str] | None:
    """Return all texts in a JSON object, unescaped; None for another text, or one with half a surrogate pair."""
    try:
        whole = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    stack, texts = [whole], []
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            stack += [*node, *node.values()]
        elif isinstance(node, list):
            stack += node
        elif isinstance(node, str):
            texts.append(node)
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return None
    return texts if isinstance(whole, dict) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A chat as a prompt, and how its answer is made and read.

    grammar: None for any text. preserved: special tokens that the answer shows as text. stops: further stop texts.
    borders: how a message begins, as (role, text). thinks: does the template know reasoning? ignored: places in the
    tools' schemas that the grammar does not hold. reader: makes a reader of one answer, which takes the `clock` of
    `AnswerReader` as well.
    """

    prompt: str
    grammar: Grammar | None = None
    preserved: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    borders: tuple[tuple[str, str], ...] = ()
    thinks: bool = False
    ignored: tuple[str, ...] = ()
    reader: Callable[..., AnswerReader] = AnswerReader
