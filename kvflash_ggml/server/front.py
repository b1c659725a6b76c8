"""What all endpoints share: the scheduler, the model's prompts, limits, and the body of a request."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from ..batching.behind import PREVIEW
from ..batching.messages import Access, Request, Sampling
from ..batching.scheduler import Scheduler
from ..chat.values import Grammar
from ..errors import ConfigError, ContextFull
from . import bodies, fields, schemas
from .errors import OLLAMAS_PATH, ApiError
from .exchange import Answer, EventStream, collected, submitted, whole
from .prompts import Embedder, Prompts
from .schema import SAMPLERS, ChatRequest, _Sampled, parse, text_of_content
from .settings import ServerSettings
from .speed import Speed
from .usage import preview_header, together

T = TypeVar("T")


THREADS = 4
"""For bodies, templates, tokenising and grammars: nothing that depends on a body runs on the loop."""

EACH = THREADS // 2
"""Threads that one client may hold, by its key or else its address: the others come to theirs."""

SLOWEST = 16 << 10
"""Bytes a second of a body, beyond the time that a client may take anyway."""

KEY = "kvflash.key"
"""Where in a request's scope its key's digest is."""

TAKEN = "kvflash.taken"
"""In the scope of a request that the scheduler has taken, which logs how it ends."""


MAX_ITEMS_BYTES = 64 << 20
"""Of all items that are kept. Of the key that has most, the response that was used longest ago goes first."""

_BESIDE = 1 << 10
"""Bytes of a kept response beside its items, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """items: of the request and of the response, lists of JSON that others kept share, as text: as objects they would
    take twenty times as much. conversation: the text that has them; salt: whose it is; key: whose request it was.
    """

    items: tuple[bytes, ...]
    conversation: str
    salt: str
    key: str = ""

    @property
    def size(self) -> int:
        return _BESIDE + sum(map(len, self.items))

    def json(self) -> bytes:
        """All items as one list."""
        return b"[%s]" % b",".join(text[1:-1] for text in self.items if len(text) > 2)


class KeptItems:
    """What requests with a `previous_response_id` go on from. From any thread."""

    def __init__(self, capacity: int = MAX_ITEMS_BYTES) -> None:
        self._capacity = capacity
        self._kept: dict[str, OrderedDict[str, Kept]] = {}  # by key
        self._bytes: Counter[str] = Counter()
        self._lock = threading.Lock()

    def keep(self, id: str, kept: Kept) -> None:
        """Keep the items of a request and of its response. Those of the largest key go, if there is no room."""
        with self._lock:
            self._kept.setdefault(kept.key, OrderedDict())[id] = kept
            self._bytes[kept.key] += kept.size
            while self._bytes.total() > self._capacity:
                ((key, _),) = self._bytes.most_common(1)
                self._bytes[key] -= self._kept[key].popitem(last=False)[1].size

    def find(self, id: str, access: Access) -> Kept | None:
        """What is kept of a response; None if it is not known, or not for this access."""
        with self._lock:
            for responses in self._kept.values():
                if id in responses and access.may(responses[id].salt):
                    responses.move_to_end(id)
                    return responses[id]
        return None

    def forget(self, conversation: str) -> None:
        """Of a conversation that has been erased, keep nothing."""
        with self._lock:
            for key, responses in self._kept.items():
                for id in [id for id, kept in responses.items() if kept.conversation == conversation]:
                    self._bytes[key] -= responses.pop(id).size


class Front:
    """What the endpoints work with. `draining`: nothing new is taken; `ready`: the model is loaded."""

    def __init__(
        self, settings: ServerSettings, scheduler: Scheduler, prompts: Prompts, embedder: Embedder | None = None
    ) -> None:
        self.settings = settings
        self.scheduler = scheduler
        self.prompts = prompts
        self.embedder = embedder
        self.created = int(time.time())
        self.draining = False
        self.viewers: Counter[str] = Counter()  # by key
        self.speed = Speed(scheduler)
        self.items = KeptItems()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kvflash-front")
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def work(self, http: HttpRequest, function: Callable[..., T], *args: Any, **more: Any) -> T:
        """Run on a thread, for the client of a request. What a user can do wrong there is his error."""
        loop = asyncio.get_running_loop()
        turns = self._turns.setdefault(client_of(http.scope), asyncio.Semaphore(EACH))
        try:
            async with turns:
                return await loop.run_in_executor(self._threads, lambda: function(*args, **more))
        except ContextFull as err:
            raise ApiError(400, str(err), code="context_length_exceeded") from None
        except ConfigError as err:
            raise ApiError(400, str(err), code="invalid_value") from None

    async def engine(self, work: Callable[[], T]) -> T:
        """Run on the engine's thread, between two requests."""
        try:
            return await asyncio.wrap_future(self.scheduler.call(work))
        except ConfigError as err:
            raise ApiError(400, str(err), code="invalid_value") from None

    async def asked(self, http: HttpRequest, kind: type[Any]) -> Any:
        """The request of this kind in a body; see `body`. What it has beside is named in the answer's header."""
        return await self.work(http, self._asked, http, kind, await self._received(http))

    def _asked(self, http: HttpRequest, kind: type[Any], data: bytearray) -> Any:
        asked, http.scope[fields.IGNORED] = parse(kind, self.loads(data), strict=self.settings.strict)
        return asked

    async def body(self, request: HttpRequest) -> Any:
        """The JSON of a body. ApiError for one that is too large, too slow, or none."""
        return await self.work(request, self.loads, await self._received(request))

    def loads(self, data: bytearray | bytes) -> Any:
        """The values of JSON that a client has sent. ApiError for too many, or for none."""
        try:
            return bodies.loads(data, most=max(bodies.MAX_VALUES, 2 * self.scheduler.model.n_ctx))
        except bodies.Refused as err:
            raise ApiError(400, f"the body is refused: {err}", code="invalid_value") from None
        except ValueError as err:
            raise ApiError(400, f"the body is no JSON: {str(err)[:200]}", code="invalid_json") from None

    async def _received(self, request: HttpRequest) -> bytearray:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # curl sends another kind unless it is told, as in Ollama's own documentation; the guard keeps foreign pages out
        if kind != "application/json" and not request.url.path.startswith(OLLAMAS_PATH):
            raise ApiError(415, "the body must be application/json", code="content_type")
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding != "identity":
            message = f"the body is encoded as {encoding[:40]!r}, and identity is all that is read: send it as it is"
            raise ApiError(415, message, code="content_encoding")
        most, stall_s, data = self.settings.max_body, self.settings.stall_timeout_s, bytearray()
        began, parts = time.monotonic(), request.stream()
        try:
            while True:
                left = stall_s + len(data) / SLOWEST - (time.monotonic() - began)
                part = await asyncio.wait_for(anext(parts, None), min(left, stall_s))
                if part is None:
                    break
                data += part
                if len(data) > most:
                    raise ApiError(413, f"the body has more than {most} bytes: --max-body", code="body_too_large")
        except ClientDisconnect:
            raise ApiError(400, "the body ended too early", code="invalid_json") from None
        except (TimeoutError, asyncio.TimeoutError):
            raise ApiError(408, "the body did not come to its end in time: --stall-timeout", code="timeout") from None
        return data

    def access(self, request: HttpRequest) -> Access:
        """Which conversations a request may see and touch: with --isolate-keys those of its key, else all."""
        settings = self.settings
        return Access.of(request.scope.get(KEY, "")) if settings.isolate_keys and settings.keys else Access()

    def admit(self) -> None:
        """ApiError while the server is draining."""
        if self.draining:
            raise ApiError(503, "the server is shutting down: try again later", code="draining", retry_after_s=30)

    def make(
        self,
        http: HttpRequest,
        asked: _Sampled,
        tokens: list[int],
        *,
        kind: str,
        most: int | None,
        logprobs: int | None = None,
        grammar: Grammar | str | None = None,
        shared_until: int = 0,
        stops: tuple[str, ...] = (),
        preserved: Mapping[int, bytes] = MappingProxyType({}),
    ) -> Request:
        """What goes to the scheduler. ApiError if the prompt is empty or has no room in the context."""
        n_ctx, settings, pool = self.scheduler.model.n_ctx, self.settings, asked.kvflash
        if not tokens:
            raise ApiError(400, "the prompt is empty", param="prompt", code="invalid_value")
        if len(tokens) + 1 > n_ctx:
            raise ApiError(
                400,
                # Claude Code shortens its history where it reads these words
                f"prompt is too long: {len(tokens)} tokens > {n_ctx} maximum, with the answer: shorten it, or start "
                f"the server with a larger -c",
                code="context_length_exceeded",
                param="messages",
            )
        wanted = settings.default_tokens if most is None else most
        if settings.most_tokens is not None:
            wanted = min(wanted, settings.most_tokens)
        for lo, hi in pool.pins:
            if not 0 <= lo < hi <= len(tokens):
                raise ApiError(400, f"kvflash.pins: [{lo}, {hi}) is no range of the prompt's {len(tokens)} tokens")
        model = self.scheduler.model
        for name, value, possible in (
            ("reading", pool.reading, model.readings),
            ("answer", pool.answer, model.answers),
        ):
            if value is not None and value not in possible:
                raise ApiError(
                    400,
                    f"kvflash.{name} can be {' or '.join(possible)} here, not {value!r}: start the server with "
                    f"--kvflash-{name} {value}",
                    code="invalid_value",
                    param=f"kvflash.{name}",
                )
        if pool.reading == PREVIEW:
            _check_preview(asked, tokens, kind=kind, grammar=grammar)
        key = http.scope.get(KEY, "")
        reuse = pool.cache_prompt and asked.cache_prompt is not False
        return Request(
            id=f"{kind}-{secrets.token_hex(12)}",
            tokens=np.array(tokens, np.int32),
            max_tokens=wanted,
            sampling=self._sampling(asked, grammar),
            stop=(*asked.stop, *stops),
            ignore_eos=asked.ignore_eos,
            logprobs=logprobs,
            conversation=pool.conversation,
            salt=self.access(http).salt(pool.cache_salt),
            key=key,
            priority=pool.priority,
            timeout_s=settings.timeout_s,
            queue_timeout_s=settings.queue_timeout_s,
            reuse=reuse,
            shared_until=min(shared_until, len(tokens) - 1),
            pins=tuple(pool.pins),
            reading=pool.reading,
            answer=pool.answer,
            drafts=pool.drafts,
            messages=_texts(asked),
            preserved=preserved,
        )

    def _sampling(self, asked: _Sampled, grammar: Grammar | str | None) -> Sampling:
        usual, bias = self.settings.sampling, {}
        for token, value in (asked.logit_bias or {}).items():
            if not token.isdecimal() or len(token) > 9 or int(token) >= self.prompts.n_vocab:
                raise ApiError(400, f"logit_bias: {token[:20]!r} is no token", param="logit_bias")
            bias[int(token)] = value
        given = {name: getattr(asked, name) for name in SAMPLERS}
        values = {name: getattr(usual, name) if value is None else value for name, value in given.items()}
        values["top_k"] = max(0, values["top_k"])
        seed = secrets.randbits(32) if asked.seed is None or asked.seed < 0 else asked.seed & 0xFFFFFFFF
        return Sampling(**values, seed=seed, logit_bias=bias, grammar=grammar)

    async def grammar(
        self, http: HttpRequest, *, text: str | None, schema: dict[str, Any] | None = None, any_json: bool = False
    ) -> str | None:
        """A grammar as text, of a schema, or of any JSON; checked."""
        if sum((text is not None, schema is not None or any_json)) > 1:
            raise ApiError(400, "grammar and a JSON format exclude each other", param="grammar")
        if text is None and schema is None and not any_json:
            return None
        return await self.work(http, self._grammar, text, schema)

    async def format_grammar(self, http: HttpRequest, asked: _Sampled) -> str | None:
        """The grammar of the form that is asked for: a grammar, a schema, any JSON, or none."""
        form, schema = asked.response_format, asked.json_schema
        if form is not None and form.type != "text" and schema is not None:
            raise ApiError(400, "json_schema and response_format exclude each other", param="json_schema")
        if form is not None and form.type == "json_schema":
            if form.json_schema is None:
                raise ApiError(400, "response_format.json_schema is missing", param="response_format")
            schema = form.json_schema.json_schema
        elif form is not None and form.type == "json_object":
            schema = form.json_object
        any_json = form is not None and form.type == "json_object" and schema is None
        return await self.grammar(http, text=asked.grammar or None, schema=schema, any_json=any_json)

    def _grammar(self, text: str | None, schema: dict[str, Any] | None) -> str:
        if schema is not None:
            schemas.check(schema, "response_format")
        grammar = self.prompts.schema_grammar(schema) if text is None else text
        try:
            self.prompts.check_grammar(grammar)
        except ConfigError as err:
            if text is not None:
                raise
            raise ConfigError(
                "this JSON schema makes a grammar that is too large, or that nothing fulfils: lower its maxItems, "
                "maxLength and repetitions"
            ) from err
        return grammar

    async def respond(
        self, http: HttpRequest, requests: Sequence[Request], answers: Sequence[Answer], *, each: int, stream: bool
    ) -> Response:
        """Put requests in line, all or none of them, and answer them as they come or as a whole. each: to a prompt.

        Those behind the first wait for each other, which --queue-timeout does not count. ApiError if there is no room.
        """
        never = self.scheduler.waiting.never([len(request.tokens) for request in requests])
        if never is not None:
            raise ApiError(400, never, code="invalid_value", param="n")
        first, *others = requests
        others = [replace(other, queue_timeout_s=None) for other in others]
        exchanges = submitted(self.scheduler, [first, *others], http.receive)
        http.scope[TAKEN] = True
        if stream:
            ping_s, stall_s = self.settings.ping_s, self.settings.stall_timeout_s
            work = partial(self.work, http)
            return EventStream(exchanges, answers, each=each, ping_s=ping_s, stall_s=stall_s, work=work)
        ended = await collected(exchanges, answers)
        headers = preview_header(together(ended, each=each).usage.preview)
        return await self.work(http, lambda: JSONResponse(whole(answers, ended, each=each), headers=headers))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _texts(asked: _Sampled) -> tuple[tuple[str, str], ...]:
    """Role and text of each message of a chat."""
    messages = asked.messages if isinstance(asked, ChatRequest) else ()
    return tuple((message.role, text_of_content(message.content)) for message in messages)


def _check_preview(asked: _Sampled, tokens: Sequence[int], *, kind: str, grammar: Grammar | str | None) -> None:
    """ApiError for what needs all of a prompt, or cannot say that its answer is a preview."""
    pool = asked.kvflash
    refused = {
        "this interface": kind not in ("chatcmpl", "cmpl"),
        "tools": isinstance(asked, ChatRequest) and bool(asked.tools),
        "a grammar or a response format": grammar is not None,
        f"kvflash.answer {pool.answer!r}": pool.answer not in (None, "pool"),
        "kvflash.pins": bool(pool.pins),
        "images": min(tokens) < 0,
    }
    for what, asked_for in refused.items():
        if asked_for:
            raise ApiError(
                400,
                f"kvflash.reading 'preview' answers from a part of the prompt, and not together with {what}: leave out "
                f"one of them",
                code="invalid_value",
                param="kvflash.reading",
            )


def client_of(scope: Scope) -> str:
    """Whose request it is: the digest of its key, or else its address."""
    return str(scope.get(KEY) or (scope.get("client") or ("",))[0])


def several(request: Request, count: int) -> list[Request]:
    """So many answers to one prompt, each with random numbers of its own."""
    seed = request.sampling.seed
    samplings = [replace(request.sampling, seed=(seed + i) & 0xFFFFFFFF) for i in range(count)]
    return [replace(request, id=f"{request.id}-{i}" if i else request.id, sampling=s) for i, s in enumerate(samplings)]
