"""A model for schedulers, made of a few lines of Python: one token a byte, and answers as they are told."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvflash_ggml.arrays import Int32s, numbers
from kvflash_ggml.batching.messages import Logprob, Request
from kvflash_ggml.batching.model import Paused, Residency
from kvflash_ggml.chat.reader import AnswerReader, Parsed, ParsedCall, Rendered, words
from kvflash_ggml.chat.rewriting import held
from kvflash_ggml.chat.values import ChatInput, Grammar
from kvflash_ggml.chat.words import CLOSE, OPEN, in_words, plain_call
from kvflash_ggml.errors import ConfigError, SnapshotError
from kvflash_ggml.media.files import MediaLimits
from kvflash_ggml.policy.qk import Reason
from kvflash_ggml.store.swapped import SwappedText
from kvflash_ggml.store.texts import usable

END = 256
STEP = 64
EMPTY = np.empty(0, np.int32)


class Hold(threading.Event):
    """Called before each step: those behind the first `steps` wait until it is set."""

    def __init__(self, steps: int = 0) -> None:
        super().__init__()
        self._left = steps

    def __call__(self) -> None:
        self._left -= 1
        assert self._left >= 0 or self.wait(60)


@dataclass(eq=False)
class FakeSwapped:
    tokens: Int32s
    places: Sequence[int] | None
    model: FakeModel
    released: bool = False

    def parts(self) -> Iterator[tuple[int, int]]:
        yield id(self), self.tokens.nbytes

    def release(self) -> None:
        assert not self.released
        self.released = True
        self.model.held -= 1


@dataclass(eq=False)
class FakeStep:
    """alone: it cannot be computed with others."""

    model: FakeModel
    alone: bool
    rows: int = 1
    error: Exception | None = None
    computed: bool = False
    more: bool = False
    reads: bool = False

    @property
    def failed(self) -> bool:
        return not self.computed or self.error is not None

    def finish(self) -> None:
        if not self.computed:
            self.model._step()
        if self.error is not None:
            raise self.error


@dataclass(eq=False)
class FakeModel:
    """reply: what follows a prompt, in bytes. on_step: called before each step of a prompt and each token; what it
    raises, the step raises. most: tokens of a step of a prompt. rows: of the step under way. held: parked texts that
    have not been released. synced: files that were waited for.

    parallel: texts at hand. together: the texts of each step that was computed for several. pending: a step waits.
    deals: the texts with requests, and the tokens they can reach, whenever the memory was dealt. short: a prompt of so
    many tokens shares a step with others. twice: one of so many might, but its question is evaluated twice. task: makes
    what answers a request.
    """

    n_ctx: int = 4096
    step_rows: int = 64
    prompt_rows: int = 256
    limit: int | None = None
    short: int = 0
    twice: int = 0
    most: int = STEP
    rows: int = 1
    stateful: bool = False
    reply: Callable[[bytes], bytes] = lambda prompt: b"an answer"
    on_step: Callable[[], None] = lambda: None
    fingerprint: str = "0123456789abcdef" * 2
    made: str = "fake"
    tokens: Int32s = field(default_factory=lambda: EMPTY)
    places: set[int] = field(default_factory=set)
    held: int = 0
    steps: int = 0
    read_tokens: int = 0
    closed: bool = False
    pins: list[tuple[int, int]] = field(default_factory=list)
    give_way: Callable[[], bool] = lambda: False
    explains: bool = False
    synced: int = 0
    files: dict[Path, Int32s] = field(default_factory=dict)
    readings: tuple[str, ...] = ("pool", "exact", "preview")
    answers: tuple[str, ...] = ("pool", "exact")
    parallel: int = 1
    together: list[list[FakeModel]] = field(default_factory=list)
    beside: Sequence[FakeModel] = ()
    first: FakeModel | None = None
    several: bool = False
    pending: bool = False
    told: int = 0
    deals: list[list[tuple[FakeModel, int]]] = field(default_factory=list)
    task: Callable[..., FakeTask] = lambda *asked: FakeTask(*asked)
    evicted_mass: float | None = None

    def __post_init__(self) -> None:
        self.several = self.parallel > 1 or self.first is not None
        if self.parallel > 1:
            names = ("n_ctx", "stateful", "reply", "on_step", "most", "short", "twice", "task")
            named = {name: getattr(self, name) for name in names}
            self.beside = [FakeModel(**named, first=self) for _ in range(1, self.parallel)]

    def limit_prompt_steps(self, rows: int | None) -> None:
        self.limit = rows

    def compute(self, steps: Sequence[Any]) -> None:
        self.together.append([step.model for step in steps])
        for step in steps:
            try:
                step.model._step()
            except Exception as err:
                step.error = err
            step.computed = True

    def deal(self, answered: Sequence[tuple[Any, int]]) -> None:
        assert not any(step.pending for step in (self, *self.beside))
        self.deals.append([(one, tokens) for one, tokens in answered])

    def known(self, tokens: Sequence[int]) -> Int32s:
        return numbers(tokens).astype(np.int32)

    def usable(self, tokens: Int32s) -> int:
        return usable(self.tokens, sorted(self.places) if self.stateful else None, tokens)

    def preview(self, request: Request, cached: int) -> Int32s | None:
        """The last 64 tokens, if twice as many are to be read."""
        tokens = request.tokens
        return tokens[-STEP:] if len(tokens) - cached > 2 * STEP else None

    def begin(
        self,
        request: Request,
        *,
        branch: int | None,
        progress: Callable[[int, int], None],
        paused: Paused | None = None,
    ) -> FakeTask:
        assert not self.closed
        self.told = request.logprobs or 0
        return self.task(self, request, branch, progress, () if paused is None else paused.drawn)

    def ended(self) -> None:
        self.pending = False

    def pause(self, drawn: Sequence[int]) -> Paused:
        return Paused(tuple(drawn), None)

    def _step(self) -> None:
        self.on_step()
        self.steps += 1

    def _cut(self, length: int) -> None:
        self.tokens = self.tokens[:length]
        self.places = {place for place in self.places if place <= length}

    def piece(self, token: int) -> bytes:
        return b"" if token == END else bytes([token])

    def ends(self, token: int) -> bool:
        return token == END

    def logprob(self, token: int, top: int) -> Logprob:
        others = tuple((token + i, self.piece(min(token + i, 255)), -0.5 - i) for i in range(top))
        return Logprob(token=token, piece=self.piece(token), logprob=-0.5, top=others)

    def prompt_logprobs(self) -> tuple[Logprob, ...]:
        """Of the text at hand, with as many alternatives as its request asked for."""
        told = [self.logprob(token, self.told) for token in self.tokens.tolist()]
        return (replace(told[0], logprob=None, top=()), *told[1:])

    def checkpoint(self) -> None:
        self.places.add(len(self.tokens))

    def swap_out(self) -> FakeSwapped:
        first = self.first or self
        first.held += 1
        return FakeSwapped(self.tokens.copy(), sorted(self.places) if self.stateful else None, first)

    def swap_in(self, swapped: SwappedText) -> None:
        assert isinstance(swapped, FakeSwapped)
        assert not swapped.released
        self.tokens, self.places = swapped.tokens.copy(), set(swapped.places or ())

    def reset(self) -> None:
        self.tokens, self.places = EMPTY, set()

    def unpin(self) -> None:
        self.pins.clear()

    def pin(self, lo: int, hi: int) -> None:
        self.pins.append((lo, hi))

    def write(self, swapped: SwappedText, path: Path, *, sync: bool) -> None:
        path.write_bytes(swapped.tokens.tobytes())
        self.synced += sync
        self.files[path] = swapped.tokens

    def read(self, path: Path) -> FakeSwapped:
        data = path.read_bytes()
        if len(data) % 4:
            raise SnapshotError(f"{path} is damaged")
        self.held += 1
        return FakeSwapped(np.frombuffer(data, np.int32), [] if self.stateful else None, self)

    def when_full(self, give_way: Callable[[], bool]) -> None:
        self.give_way = give_way

    def explain(self, wanted: bool) -> None:
        self.explains = wanted

    def residency(self) -> Residency:
        chunks = -(-len(self.tokens) // 64)
        reason = Reason(0, 1, 2, 3, 0.25, False)
        return Residency(
            number=self.steps, length=len(self.tokens), resident=tuple(range(chunks)), recalled={0: reason, 1: None}
        )

    def counters(self) -> Mapping[str, Any]:
        return {
            "pool": 1024, "share": 1024, "length": len(self.tokens), "chunks": -(-len(self.tokens) // 64),
            "resident": 1, "page_ins": 3, "page_outs": 2, "page_bytes": 64, "host_bytes": 128, "spilled_bytes": 0,
            "device_bytes": 4096, "drafted": 2, "accepted": 1, "replaced": 1, "drafted_total": 5,
            "accepted_total": 4, "replaced_total": 3, "evicted_mass": self.evicted_mass, "policy": "lru",
        }  # fmt: skip

    def close(self) -> None:
        self.closed = True
        for one in self.beside:
            one.close()


@dataclass(eq=False)
class FakeTask:
    """reads: see `model.Task`."""

    model: FakeModel
    request: Request
    branch: int | None
    progress: Callable[[int, int], None]
    drawn: Sequence[int]
    reads: bool = False

    def steps(self) -> Generator[int | FakeStep | None]:
        model, request = self.model, self.request
        tokens = np.concatenate([request.tokens, np.asarray(self.drawn, np.int32)])
        known = model.usable(tokens)
        model._cut(known)
        total = len(tokens) - known
        short = model.several and total <= model.short and not self.drawn
        self.reads = not short
        yield None
        drawable = short and total != model.twice and total <= (model.limit or total)
        if drawable:
            yield from self.waits(FakeStep(model, False, rows=total, reads=True))
            model.tokens = tokens.copy()
            model.read_tokens += total
            self.progress(total, total)
        else:
            yield from self.pieces(tokens, known)
        self.reads = False
        model.rows, drawable = 1, model.several and not self.drawn
        for token in [*model.reply(bytes(request.tokens.astype(np.uint8))), END][len(self.drawn) :]:
            if drawable:
                drawable = False  # the first one needs no step
            elif model.several:
                yield from self.waits(FakeStep(model, request.answer == "exact"))
            else:
                model._step()
            yield token
            model.tokens = np.append(model.tokens, np.int32(token))

    def pieces(self, tokens: Int32s, known: int) -> Iterator[FakeStep | None]:
        """Read a prompt, of which so many tokens are known, in steps of its own."""
        self.reads, model, total = True, self.model, len(tokens) - known
        while (start := len(model.tokens)) < len(tokens):
            model.rows = min(model.most, model.limit or model.most, len(tokens) - start)
            model.rows = model.rows // 2 if model.rows == model.twice else model.rows
            yield from self.waits(FakeStep(model, True, rows=model.rows, reads=True))
            model.tokens = tokens[: start + model.rows].copy()
            if self.branch is not None and start < self.branch <= len(model.tokens):
                model.places.add(self.branch)
            model.read_tokens += len(model.tokens) - start
            self.progress(len(model.tokens) - known, total)
            if len(model.tokens) < len(tokens) or not model.several:  # where the first token takes a step of its own
                yield None

    def waits(self, step: FakeStep) -> Iterator[FakeStep | None]:
        self.model.pending = True
        try:
            yield step
        finally:
            self.model.pending = False
        step.finish()


def named_call(name: str, text: str) -> Parsed:
    """An answer that is the arguments of this function."""
    calls = (ParsedCall(name=name, arguments=text, closed=False),) if text else ()
    return Parsed(calls=calls, read=len(text.encode()))


def marked_calls(text: str) -> Parsed | None:
    """An answer with calls in JSON between marks."""
    begin, _, more = text.partition(OPEN.strip())
    calls, read = [], len(begin)
    while more:
        body, end, after = more.partition(CLOSE.strip())
        if not end:
            break
        try:
            call = json.loads(body)
            calls.append(ParsedCall(name=call["name"], arguments=json.dumps(call["arguments"])))
        except (ValueError, TypeError, RecursionError):
            return None
        read = len(text) - len(after)
        more = after.lstrip().removeprefix(OPEN.strip())
    held = next((n for n in range(len(OPEN) - 2, 0, -1) if begin.endswith(OPEN[:n])), 0)
    begin = begin[: len(begin) - held]
    size, first = len(text[:read].encode()), len(begin.encode())
    return Parsed(content=begin, calls=tuple(calls), read=size if calls else first, plain=size, first=first)


TEMPLATE = "{% messages, one a line, with tool_calls between <tool_call> marks; tools first %}"


@dataclass(frozen=True)
class FakeImage:
    tokens: tuple[int, ...]

    def load(self) -> None: ...


@dataclass
class FakePrompts:
    """Renders a chat as `role: content` lines. salts: of chats, images and grammars, whose results would be kept."""

    template: str | None = TEMPLATE
    sees: bool = False
    hears: bool = False
    seen: list[bytes] = field(default_factory=list)
    limits: MediaLimits | None = None
    rendered: list[list[dict[str, Any]]] = field(default_factory=list)
    gap: dict[str, int] = field(default_factory=dict)
    salts: list[str] = field(default_factory=list)

    @property
    def n_vocab(self) -> int:
        return 257

    def chat(self, asked: ChatInput) -> Rendered:
        self.salts.append(asked.salt)
        if self.template is None:
            raise ConfigError("no chat template")
        tools = [] if asked.choice == "none" else asked.tools
        messages = [dict(message) for message in asked.messages]
        if "tools" not in self.template:
            messages = in_words(messages, tools, calls="tool_calls" in self.template)
        begun = messages.pop()["content"] if asked.continued else ""
        for call in (call for message in messages for call in message.get("tool_calls", ())):
            made = plain_call(call)["function"]  # templates have an object
            call["function"] = {"name": made["name"], "arguments": json.loads(made["arguments"])}
        self.rendered.append(messages)
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        prompt = "\n".join([*(["tools"] if tools else []), *lines, "assistant: "]) + begun
        grammar = Grammar(text="root ::= call", lazy=asked.choice == "auto") if tools else None
        reads = partial(named_call, asked.named) if asked.named is not None else marked_calls if tools else None
        marks = words("tool_call name arguments")
        return Rendered(prompt=prompt, grammar=grammar, reader=partial(AnswerReader, reads, marks=marks))

    def preserved(self, texts: Sequence[str]) -> dict[int, bytes]:
        return {}

    def see(self, data: bytes, limits: MediaLimits, salt: str) -> FakeImage:
        """An image or a sound of as many rows as its file has bytes."""
        self.salts.append(salt)
        if data == b"bad":
            raise ConfigError("an image of 3 bytes cannot be decoded")
        self.seen.append(data)
        self.limits = limits
        return FakeImage((60, *(-1 - byte for byte in data), 62))

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        return bytes(t for t in tokens if t < 256)

    def check_grammar(self, grammar: Grammar | str, salt: str) -> None:
        self.salts.append(salt)
        if "root" not in (grammar if isinstance(grammar, str) else grammar.text):
            raise ConfigError("the grammar has no root")

    def schema_grammar(self, schema: Any, *, strict: bool, where: str) -> tuple[str, tuple[str, ...]]:
        found = held(schema, where, strict=strict)
        return "root ::= object", found.ignored

    @property
    def facts(self) -> dict[str, Any]:
        return {"architecture": "fake"}
