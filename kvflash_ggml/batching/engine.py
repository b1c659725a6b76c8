"""Many answers of one model at once, for programs: a scheduler without a server."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, islice
from types import TracebackType
from typing import TYPE_CHECKING

from ..errors import ConfigError, ContextFull, KVFlashError, NotFinite, brief
from ..notation import stop_texts
from . import llama
from .messages import CONTEXT, INVALID, NUMERICAL, Event, Failed, Finished, Piece, Request, Sampling, Started, Usage
from .scheduler import Limits, Scheduler

if TYPE_CHECKING:
    from ..llama.llama import Llama

AHEAD = 2
"""Prompts of `generate_many` that are with the scheduler, for each slot: one that is answered, and one that waits."""

_ERRORS: Mapping[str, type[KVFlashError]] = {CONTEXT: ContextFull, INVALID: ConfigError, NUMERICAL: NotFinite}


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """An answer of `Engine.generate_many`.

    reason: "stop", "length" at a limit, or "error". error: why there is no more of it, None where it has come to its
    end. usage: what it took; tokens and seconds.
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    reason: str = "error"
    usage: Usage = field(default_factory=Usage)
    error: str | None = None


class Engine:
    """Answers many prompts at once on the pool of a `Llama`, which it closes at its end.

    The `Llama` decides how many answers are computed in one step: give it `kvflash=KVFlashConfig(parallel=8)`. Other
    answers wait. Nothing else may use the `Llama` meanwhile. itl_target: most seconds between two tokens of an answer
    while another prompt is read. None for no such bound: prompt steps have up to 1,024 tokens then.

    KVFlashError for a `Llama` without a pool.
    """

    def __init__(self, llm: Llama, *, itl_target: float | None = None) -> None:
        self._llm = llm
        # a program bounds its requests itself
        limits = Limits(most=1 << 30, most_tokens=1 << 60, itl_target=itl_target)
        self._scheduler = Scheduler(llama.LlamaModel(llm), limits=limits)
        self._numbers = count()
        self._scheduler.start()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all answers that are not finished, and free the model."""
        self._scheduler.close()

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        max_tokens: int = 256,
        stop: str | Sequence[str] = (),
        priority: int = 0,
    ) -> AsyncIterator[Piece | Finished]:
        """Answer a prompt, text or tokens: yield its pieces as they come, and what it took at the end.

        The answer ends behind `max_tokens` tokens, before the text or one of the texts `stop`, or where the model ends
        it. It is cancelled if the caller leaves the iterator. sampling: llama.cpp's defaults unless given. priority:
        prompts of a higher one are read first.

        ContextFull for a prompt without room in the context, KVFlashError for what else goes wrong with it, and in a
        process that `fork` has made.
        """
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()
        id = self._name()

        def tell(event: Event) -> None:
            with suppress(RuntimeError):  # the loop has ended, and nobody reads any more
                loop.call_soon_threadsafe(events.put_nowait, event)

        self._scheduler.submit(self._request(id, prompt, sampling, max_tokens, stop, priority), tell)
        try:
            while True:
                event = await events.get()
                if isinstance(event, Failed):
                    raise _ERRORS.get(event.code, KVFlashError)(event.message)
                if not isinstance(event, Started):
                    yield event
                if isinstance(event, Finished):
                    return
        finally:
            self._scheduler.cancel(id)

    def generate_many(
        self,
        prompts: Iterable[str | Sequence[int]],
        sampling: Sampling | None = None,
        *,
        max_tokens: int = 256,
        stop: str | Sequence[str] = (),
        priority: int = 0,
        progress: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        """Answer all prompts, and return the answers in the order of the prompts. Arguments: those of `generate`.

        Prompts are taken as slots become free, so they may be a generator. progress: called on this thread with the
        number of a prompt, from 0 on, and its answer, in the order in which the answers end. An answer that fails says
        why, and the others go on. After Ctrl-C, and after an error of `progress`, all answers that run are cancelled.
        ConfigError for a single text, KVFlashError after `close`, and in a process that `fork` has made.
        """
        if isinstance(prompts, (str, bytes)):  # each letter would be a prompt
            raise ConfigError(f"prompts={brief(repr(prompts))}: it is one prompt: put it in a list")
        ended: queue.SimpleQueue[tuple[int, Completion]] = queue.SimpleQueue()
        waiting, running, done = enumerate(prompts), dict[int, str](), dict[int, Completion]()
        max_running = AHEAD * len(self._scheduler.slots)
        try:
            while True:
                for number, prompt in islice(waiting, max_running - len(running)):
                    id = running[number] = self._name()
                    collected = _Collected(number, ended)
                    try:
                        request = self._request(id, prompt, sampling, max_tokens, stop, priority)
                        self._scheduler.submit(request, collected)
                    except ConfigError as err:
                        collected(Failed(code=INVALID, message=str(err)))
                if not running:
                    return [done[number] for number in range(len(done))]
                number, completion = ended.get()
                del running[number]
                done[number] = completion
                if progress is not None:
                    progress(number, completion)
        finally:
            for id in running.values():
                self._scheduler.cancel(id)

    def _name(self) -> str:
        return f"e{next(self._numbers)}"

    def _request(
        self,
        id: str,
        prompt: str | Sequence[int],
        sampling: Sampling | None,
        max_tokens: int,
        stop: str | Sequence[str],
        priority: int,
    ) -> Request:
        """Make a request. ConfigError for a prompt without tokens or with unknown ones, and for another wrong value."""
        if not isinstance(max_tokens, int) or max_tokens < 1:
            raise ConfigError(f"max_tokens={max_tokens!r}: a whole number of tokens, at least 1")
        if not isinstance(priority, int):
            raise ConfigError(f"priority={priority!r}: a whole number, higher ones first")
        if not isinstance(sampling, Sampling | None):
            raise ConfigError(f"sampling={sampling!r}: a Sampling, or None")
        if isinstance(prompt, str):
            prompt = self._llm.tokenize(prompt.encode("utf-8", "replace"), special=True)
        try:
            tokens = self._scheduler.model.known(prompt)
        except TypeError as err:
            raise ConfigError(f"the prompt {brief(repr(prompt))} is neither a text nor a list of tokens") from err
        if not len(tokens):
            raise ConfigError("the prompt has no tokens, and this model puts none before it: give it at least one")
        return Request(
            id=id,
            tokens=tokens,
            max_tokens=max_tokens,
            sampling=Sampling() if sampling is None else sampling,
            stop=tuple(stop_texts(stop)),
            priority=priority,
        )


class _Collected:
    """The sink of a request: puts its answer to `ended` once it has ended."""

    def __init__(self, number: int, ended: queue.SimpleQueue[tuple[int, Completion]]) -> None:
        self._number = number
        self._ended = ended
        self._text = ""

    def __call__(self, event: Event) -> None:
        if isinstance(event, Piece):
            self._text += event.text
        elif isinstance(event, Failed):
            self._ended.put((self._number, Completion(text=self._text, error=event.message)))
        elif isinstance(event, Finished):
            completion = Completion(text=self._text, tokens=event.tokens, reason=event.reason, usage=event.usage)
            self._ended.put((self._number, completion))
