"""Asks the model once: streams the answer, times it, and stops at Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from .options import SamplingOptions
from .terminal import Progress

if TYPE_CHECKING:
    from ..llama.llama import Llama

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAnswer:
    """One answer, its tokens and its times in seconds. evaluated: tokens of the prompt that were computed."""

    text: str
    finish_reason: str
    prompt_tokens: int
    evaluated: int
    generated: int
    prompt_s: float
    generation_s: float
    seed: int

    @property
    def interrupted(self) -> bool:
        return self.finish_reason == "interrupted"

    @property
    def reused(self) -> int:
        """Tokens of the prompt that were known from earlier answers."""
        return 0 if self.interrupted else self.prompt_tokens - self.evaluated

    @property
    def prompt_per_second(self) -> float:
        return self.evaluated / self.prompt_s if self.prompt_s > 0 else 0.0

    @property
    def generated_per_second(self) -> float:
        """Tokens per second after the first one, which comes with the prompt's evaluation."""
        return (self.generated - 1) / self.generation_s if self.generation_s > 0 else 0.0


class Meter:
    """Counts tokens and takes times, by wrapping the model's `generate`."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.evaluated = 0
        self.generated = 0
        self.start = self.first = self.last = time.perf_counter()

    @contextmanager
    def attached(self, llm: Llama) -> Iterator[None]:
        original, wrapped = llm.generate, vars(llm)

        def generate(tokens: Any, *args: Any, **kwargs: Any) -> Iterator[int]:
            self.prompt_tokens = len(tokens)
            # a pool tells through its progress; it may know more of the text than what is at hand
            self.evaluated = 1 if llm.kvflash is not None else max(1, len(tokens) - _known(llm, tokens))
            self.start = self.first = self.last = time.perf_counter()
            with closing(original(tokens, *args, **kwargs)) as stream:
                for token in stream:
                    self.last = time.perf_counter()
                    if self.generated == 0:
                        self.first = self.last
                    self.generated += 1
                    yield token

        wrapped["generate"] = generate
        try:
            yield
        finally:
            del wrapped["generate"]


class StopAnswer(KeyboardInterrupt):
    """The first Ctrl-C, raised where nothing is half done."""


class Interrupt:
    """Inside the `with`, the first Ctrl-C only sets `requested`; a second raises KeyboardInterrupt.

    An exception in the middle of a step could leave the cache and its page table in disagreement.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None
        self._mine = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Interrupt:
        if self._mine:
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._mine:
            signal.signal(signal.SIGINT, self._previous)

    def check(self) -> None:
        """Raise StopAnswer if Ctrl-C was pressed."""
        if self.requested:
            raise StopAnswer

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


def ask(
    llm: Llama,
    request: str | list[Message],
    *,
    sampling: SamplingOptions,
    seed: int,
    emit: Callable[[str], None] | None,
    show_progress: bool,
) -> TimedAnswer:
    """Complete a text, or answer a list of messages.

    emit: gets the text piece by piece, None to only collect it. Ctrl-C ends the answer with
    finish_reason "interrupted"; a second one raises KeyboardInterrupt.
    """
    view = llm.kvflash
    how: dict[str, Any] = {} if view is None else {"pool": view.pool, "exact": view.reading == "exact"}
    meter, progress = Meter(), Progress(shown=show_progress, **how)
    pieces: list[str] = []
    finish = "stop"

    with Interrupt() as interrupt, meter.attached(llm):

        def on_progress(done: int, total: int) -> None:
            if meter.generated == 0:
                meter.evaluated = done
                meter.first = meter.last = time.perf_counter()
                progress.update(done, total)
                interrupt.check()

        llm.kvflash_progress, llm.kvflash_samplers = on_progress, sampling
        try:
            with closing(_stream(llm, request, sampling, seed)) as stream:
                for piece, reason in stream:
                    progress.erase()
                    if piece:
                        pieces.append(piece)
                        if emit is not None:
                            emit(piece)
                    if reason is not None:
                        finish = reason
                    interrupt.check()
        except StopAnswer:
            finish = "interrupted"
        finally:
            progress.erase()
            llm.kvflash_progress = llm.kvflash_samplers = None

    return TimedAnswer(
        text="".join(pieces),
        finish_reason=finish,
        prompt_tokens=meter.prompt_tokens,
        evaluated=meter.evaluated,
        generated=meter.generated,
        prompt_s=meter.first - meter.start,
        generation_s=meter.last - meter.first,
        seed=seed,
    )


def finish_preview(llm: Llama, *, shown: bool) -> None:
    """Prefill the whole prompt that a preview has answered, if there is one. Ctrl-C ends it; what was read stays."""
    with Interrupt() as interrupt, Progress(shown=shown, doing="reading the prompt whole") as progress:

        def on_progress(done: int, total: int) -> None:
            progress.update(done, total)
            interrupt.check()

        llm.kvflash_progress = on_progress
        try:
            llm.finish_preview()
        except StopAnswer:
            pass
        finally:
            llm.kvflash_progress = None


def _known(llm: Llama, tokens: Any) -> int:
    """Guess how many leading tokens the model knows; progress reports correct it."""
    pairs = zip(llm.input_ids[: llm.n_tokens], tokens, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(llm.n_tokens, len(tokens)))


def _stream(
    llm: Llama, request: str | list[Message], sampling: SamplingOptions, seed: int
) -> Generator[tuple[str, str | None]]:
    settings: dict[str, Any] = {
        "stream": True,
        "max_tokens": sampling.max_tokens,
        "seed": seed,
    }
    if isinstance(request, str):
        pieces: Any = llm.create_completion(request, **settings)
        with closing(pieces) as chunks:
            for chunk in chunks:
                choice = chunk["choices"][0]
                yield choice["text"], choice["finish_reason"]
    else:
        with closing(llm.create_chat_completion(messages=request, **settings)) as chunks:
            for chunk in chunks:
                choice = chunk["choices"][0]
                yield choice["delta"].get("content") or "", choice["finish_reason"]
