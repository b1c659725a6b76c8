"""One answer: the prompt is read, tokens are drawn, text goes out."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

from ..errors import ConfigError, ContextFull
from .behind import PREVIEW
from .messages import (
    CANCELLED,
    CONTEXT,
    DEADLINE,
    INVALID,
    SHUTDOWN,
    Finished,
    Logprob,
    Missed,
    Piece,
    Preview,
    Request,
    Started,
    Usage,
)
from .model import Model, Paused, Pending
from .queue import Job
from .slot import Slot


class TextStream:
    """Bytes go in, text comes out; what may yet become a stop string is held back.

    `stopped` is the stop string that ended the text, once one has.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(word for word in stop if word)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._start = 0  # where the held text begins, in characters
        self._waiting: deque[tuple[int, Logprob]] = deque()
        self.stopped: str | None = None

    def push(self, piece: bytes, logprob: Logprob | None = None) -> tuple[str, tuple[Logprob, ...]]:
        """More bytes of the text. Returns what is final now, and what is told of its tokens."""
        if logprob is not None:
            self._waiting.append((self._start + len(self._held), logprob))
        self._held += self._decoder.decode(piece)
        if not self._stop:
            return self._release(len(self._held))
        at, word = min(((at, word) for word in self._stop if (at := self._held.find(word)) >= 0), default=(-1, ""))
        if at >= 0:
            self.stopped = word
            out = self._release(at)
            self._held = ""
            self._waiting.clear()
            return out
        return self._release(len(self._held) - self._beginning())

    def finish(self) -> tuple[str, tuple[Logprob, ...]]:
        """The text has ended: what was held back is final, and half a character is a replacement mark."""
        if self.stopped is None:
            self._held += self._decoder.decode(b"", True)
        return self._release(len(self._held), everything=True)

    def _release(self, count: int, *, everything: bool = False) -> tuple[str, tuple[Logprob, ...]]:
        text, self._held = self._held[:count], self._held[count:]
        self._start += count
        final = []
        # a token without text of its own, as half a character, goes with the text before it
        while self._waiting and (everything or not self._held or self._waiting[0][0] < self._start):
            final.append(self._waiting.popleft()[1])
        return text, tuple(final)

    def _beginning(self) -> int:
        """How many characters at the end could begin a stop string."""
        longest = max(len(word) for word in self._stop) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-count:]
            if any(word.startswith(tail) for word in self._stop):
                return count
        return 0


class Cancelled(Exception):
    """Nobody waits for the answer any more."""


class DeadlinePassed(Exception):
    """The answer took too long."""


class ShuttingDown(Exception):
    """Answers that run end now."""


ENDS: Mapping[type[Exception], str] = {
    Cancelled: CANCELLED,
    DeadlinePassed: DEADLINE,
    ShuttingDown: SHUTDOWN,
    ContextFull: CONTEXT,
    ConfigError: INVALID,  # pins that the pool cannot hold
}
"""What ends an answer, with its code. The text stays at hand."""


class PutAside(Exception):
    """The reader has enough for now: `make` goes on from here when it is called again."""


class Answer:
    """check: called between two steps; what it raises ends the answer, and what was read stays at hand. between: called
    between two steps of the prompt, with the tokens read.

    started: when the text was at hand; 0.0 before. name: the identifier that its conversation gets, "" for the one it
    has. conversation: that identifier, once it is known. preview: None for an answer that is none.
    """

    def __init__(
        self,
        job: Job,
        clock: Callable[[], float],
        *,
        check: Callable[[], None],
        between: Callable[[int], None] = lambda done: None,
    ) -> None:
        self._job = job
        self._clock = clock
        self._check = check
        self._between = between
        self._began = clock()
        self.started = self._first = self._last = 0.0
        self._to_read = 1
        self._read_yet: int | None = None
        self._tokens: list[int] = []
        self._before: Mapping[str, Any] = {}
        self._text = TextStream(job.request.stop)
        self._paused: Paused | None = None
        self._missed: Missed | None = None
        self.gaps: deque[float] = deque(maxlen=0)  # gets the seconds between two tokens
        self.name = self.conversation = ""
        self.preview: Preview | None = None

    @property
    def generated(self) -> int:
        """Tokens so far."""
        return len(self._tokens)

    @property
    def reading(self) -> tuple[int, int] | None:
        """Tokens of the prompt that were read for it, and that are to be; None before, and once they are."""
        done = self._read_yet
        return None if done is None or self._first else (done, self._to_read)

    @property
    def usage(self) -> Usage:
        """So far."""
        request, now = self._job.request, self._clock()
        read = bool(self._first)
        return Usage(
            prompt=len(request.tokens) if read else 0,
            cached=len(request.tokens) - self._to_read if read and self.preview is None else 0,
            generated=len(self._tokens),
            queue_s=self._began - self._job.submitted,
            restore_s=(self.started or now) - self._began,
            prompt_s=(self._first or now) - (self.started or now),
            generation_s=self._last - self._first if read else 0.0,
            missed=self._missed,
            preview=self.preview,
        )

    def make(self, slot: Slot, beside: Sequence[Slot] = ()) -> Generator[Pending | None, None, Finished]:
        """Make the answer in a slot, or go on with it, its pieces to the job's sink. Returns what ends it. PutAside.

        Yields each step that may be computed with others, and None when a token has been drawn and sent, or another
        prompt may begin. beside: see `Slot.take`.
        """
        request, model, sink = self._job.request, slot.model, self._job.sink
        room = model.n_ctx - len(request.tokens)
        if room < 1:
            raise ContextFull(
                f"Requested tokens ({len(request.tokens) + 1}) exceed context window of {model.n_ctx}: shorten the "
                f"prompt, or start the server with a larger -c"
            )
        if self._paused is None:
            self._missed = missed_of(request, slot.differs(request), model.piece)
        if request.reading == PREVIEW:
            request = self._part_of(request, slot)
        conversation = slot.take(request, drawn=self._tokens, beside=beside)
        conversation.id = self.conversation = self.name or conversation.id
        if self._paused is None:
            self._before = model.counters()
            sink(Started(conversation=conversation.id, preview=self.preview))
            self.started = self._clock()
        branch = slot.branch(request) if self._paused is None else None
        with closing(model.generate(request, branch=branch, progress=self._progress, paused=self._paused)) as stream:
            reason = yield from self._read(model, stream, min(request.max_tokens, room))
        self._tell(*self._text.finish())
        model.checkpoint()
        return Finished(
            reason=reason,
            usage=self.usage,
            stop=self._text.stopped,
            tokens=tuple(self._tokens),
            report=self._report(model),
        )

    def _part_of(self, request: Request, slot: Slot) -> Request:
        """Return what a preview reads in place of a prompt: a text that no request continues. Else the prompt as usual.

        The client is told the conversation that the prompt continues, which gets the whole prompt later.
        """
        tokens = slot.preview(request) if self._paused is None else None
        if tokens is None:
            return replace(request, reading=None)
        self.name = slot.continues(request)
        self.preview = Preview(read=len(tokens), prompt=len(request.tokens))
        return replace(request, tokens=tokens, reading=None, reuse=False)

    def _read(
        self, model: Model, stream: Iterator[int | Pending | None], limit: int
    ) -> Generator[Pending | None, None, str]:
        """Take at most so many tokens, and return why the answer ends: "stop" or "length". PutAside."""
        request = self._job.request
        endless = request.ignore_eos and request.sampling.grammar is None  # nothing may follow a grammar's end
        before = 0.0
        for token in stream:
            if not isinstance(token, int):
                yield token
                continue
            self._last = self._clock()
            if before:
                self.gaps.append(self._last - before)
            elif request.prompt_logprobs:
                self._tell("", model.prompt_logprobs())
            before = self._last
            self._first = self._first or self._last
            if limit == 0:
                break
            if model.ends(token) and not endless:
                if request.prompt_logprobs:  # programs that measure take the last token for the answer's
                    self._tell(*self._text.push(b"", model.logprob(token, request.logprobs or 0)))
                return "stop"
            self._tokens.append(token)
            logprob = None if request.logprobs is None else model.logprob(token, request.logprobs)
            piece = request.preserved.get(token)
            self._tell(*self._text.push(model.piece(token) if piece is None else piece, logprob))
            if len(self._tokens) == 1:  # another turn, or this one again, goes on from the prompt's end
                model.checkpoint()
            if self._text.stopped is not None:
                return "stop"
            if len(self._tokens) >= limit:
                break
            if self._job.full() and request.reuse and self.preview is None:
                self._paused = model.pause(self._tokens)
                raise PutAside
            self._check()
            yield None
        return "length"

    def _tell(self, text: str, logprobs: tuple[Logprob, ...]) -> None:
        """Give the sink what is final."""
        if text or logprobs:
            self._job.sink(Piece(text=text, logprobs=logprobs))

    def _progress(self, done: int, total: int) -> None:
        if not self._first:
            self._to_read, self._read_yet = total, done
        self._check()
        if done < total:  # behind the last step the logits are needed
            self._between(done)

    def _report(self, model: Model) -> dict[str, Any]:
        """What the pool did for this answer."""
        now, before = model.counters(), self._before
        moved = {name: now[name] - before.get(name, 0) for name in ("page_ins", "page_outs")}
        kept = (
            "length", "chunks", "resident", "evicted_mass", "policy", "read_exactly", "answered_exactly", "drafted",
            "accepted",
        )  # fmt: skip
        missed = {} if self._missed is None else {"missed": asdict(self._missed)}
        return {**{name: now[name] for name in kept if name in now}, **moved, **missed}


def missed_of(request: Request, at: int | None, piece: Callable[[int], bytes]) -> Missed | None:
    """Which message of a prompt differs at a token; None for none, or for the last one, which is news.

    at: None for nowhere. piece: the bytes of a token.
    """
    if at is None:
        return None
    before = _dense(b"".join(map(piece, request.tokens[:at].tolist())).decode("utf-8", "replace"))
    place = 0
    for number, (role, text) in enumerate(request.messages[:-1]):
        found = before.find(_dense(text), place)
        if found < 0:
            return Missed(at_token=at, message=number, role=role)
        place = found + len(_dense(text))
    return None


def _dense(text: str) -> str:
    """Without white space, which templates and tokenizers change."""
    return "".join(text.split())
