"""One answer: the prompt is read, tokens are drawn, text goes out."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

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
from .model import Paused, ServedText
from .queue import Job
from .slot import Slot

if TYPE_CHECKING:
    from ..runtime.task import Pending, Task


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
        """Add bytes of the text. Returns what is final now, and what is told of its tokens."""
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
        """End the text: what was held back is final, and half a character is a replacement mark."""
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
        """Return how many characters at the end could begin a stop string."""
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


class Answer:
    """An answer: `begin` takes a slot for it, and `advance` goes on until there is an `end`.

    started: when the text was at hand; 0.0 before. name: the identifier that its conversation gets, "" for the one it
    has. conversation: that identifier, once it is known. preview: None for an answer that is none. read_yet: tokens
    that were read in this turn, and that are to be; an estimate before the first step. waits: its reader has enough for
    now, and `begin` goes on from here. turns_s, swap_s: seconds of its earlier turns in a slot, and those that it takes
    to swap its text out and in again. end: once it has come to its end.
    """

    def __init__(self, job: Job, clock: Callable[[], float]) -> None:
        self._job = job
        self._clock = clock
        self._began = clock()
        self._model: ServedText | None = None  # of its slot, while it is made
        self._task: Task | None = None
        self._steps: Generator[int | Pending | None] | None = None
        self._request = job.request  # a preview reads a part of its prompt
        self._turn = self._newest = 0.0  # when the first and the newest token of this turn were drawn
        self.turns_s = self.swap_s = 0.0
        self._limit = 0
        self.waits = False
        self.end: Finished | None = None
        self.started = self._first = self._last = 0.0
        self._to_read = 1
        self._read_yet: int | None = None
        self.read_yet = 0, 0
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
    def reads(self) -> bool:
        """Whether its prompt is being read in steps of its own."""
        return self._task is not None and self._task.reads

    @property
    def held(self) -> float | None:
        """Seconds since the first token of this turn; None before it, and while the text is read."""
        return None if self.reads or not self._newest else self._clock() - self._turn

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

    def begin(self, slot: Slot, beside: Sequence[Slot] = ()) -> None:
        """Take a slot, or go on in one with what was put aside. beside: see `Slot.take`. ContextFull."""
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
                self._request = self._part_of(request, slot)
        request = self._request
        conversation = slot.take(request, drawn=self._tokens, beside=beside)
        conversation.id = self.conversation = self.name or conversation.id
        if self._paused is None:
            self._before = model.counters()
            sink(Started(conversation=conversation.id, preview=self.preview))
            self.started = self._clock()
        branch = slot.branch(request) if self._paused is None else None
        self._model, self._limit, self._newest, self.waits = model, min(request.max_tokens, room), 0.0, False
        self.read_yet = 0, len(request.tokens) - model.usable(request.tokens)
        self._task = model.begin(request, branch=branch, progress=self._progress, paused=self._paused)
        self._steps = self._task.steps()

    def advance(self) -> Pending | None:
        """Go on to the next step, which may be computed with others, and return it.

        None where a token was drawn and sent, another prompt may begin, or the answer is over for now.
        """
        assert self._steps is not None
        token = next(self._steps, "length")
        if not isinstance(token, int | str):
            return token
        reason = token if isinstance(token, str) else self._take(token)
        if reason is not None:
            self._finish(reason)
        return None

    def put_aside(self) -> None:
        """Leave the slot between two tokens. `begin` goes on from there."""
        assert self._model is not None
        self._paused, self.waits = self._model.pause(self._tokens), True
        self.close()

    def close(self) -> None:
        """Leave the slot: nothing more is made for now."""
        if self._model is not None:
            model, self._model = self._model, None
            try:
                if self._steps is not None:
                    self._steps.close()
            finally:
                model.ended()

    def _finish(self, reason: str) -> None:
        """Send what was held back, and note how the answer ended."""
        model = self._model
        assert model is not None
        self.close()
        self._tell(*self._text.finish())
        model.checkpoint()
        self.end = Finished(
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
        tokens = slot.preview(request)
        if tokens is None:
            return replace(request, reading=None)
        self.name = slot.continues(request)
        self.preview = Preview(read=len(tokens), prompt=len(request.tokens))
        return replace(request, tokens=tokens, reading=None, reuse=False)

    def _take(self, token: int) -> str | None:
        """Send a token. Returns why the answer ends with it, "stop" or "length"; None where it goes on."""
        request, model = self._job.request, self._model
        assert model is not None
        endless = request.ignore_eos and request.sampling.grammar is None  # nothing may follow a grammar's end
        before, self._newest = self._newest, self._clock()
        self._last = self._newest
        if before:
            self.gaps.append(self._last - before)
        else:
            self._turn = self._newest
        if request.prompt_logprobs and not self._first:
            self._tell("", model.prompt_logprobs())
        self._first = self._first or self._last
        if self._limit == 0:
            return "length"
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
        if len(self._tokens) >= self._limit:
            return "length"
        if self._job.full():
            self.put_aside()
        return None

    def _tell(self, text: str, logprobs: tuple[Logprob, ...]) -> None:
        """Give the sink what is final."""
        if text or logprobs:
            self._job.sink(Piece(text=text, logprobs=logprobs))

    def _progress(self, done: int, total: int) -> None:
        self.read_yet = done, total
        if not self._first:  # later the text is read again
            self._to_read, self._read_yet = total, done

    def _report(self, model: ServedText) -> dict[str, Any]:
        """Report what the pool did for this answer."""
        now, before = model.counters(), self._before
        moved = {name: now[name] - before.get(name, 0) for name in ("page_ins", "page_outs")}
        kept = (
            "length", "chunks", "resident", "evicted_mass", "policy", "read_exactly", "answered_exactly",
            "drafted", "accepted", "replaced",
        )  # fmt: skip
        missed = {} if self._missed is None else {"missed": asdict(self._missed)}
        return {**{name: now[name] for name in kept if name in now}, **moved, **missed}


def missed_of(request: Request, at: int | None, piece: Callable[[int], bytes]) -> Missed | None:
    """Return which message of a prompt differs at a token; None for none, or for the last one, which is news.

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
    """Drop white space, which templates and tokenizers change."""
    return "".join(text.split())
