"""Shared by all endpoints: the scheduler, the prompts of the model, limits, and how a request is answered."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..batching.behind import PREVIEW
from ..batching.conversations import ConversationBusy
from ..batching.messages import Access, Image, Request, Sampling
from ..batching.scheduler import Scheduler
from ..chat.formats import schema_of
from ..chat.values import Grammar
from ..errors import ConfigError
from . import bodies, fields, forms
from .errors import ApiError, blaming, invalid
from .exchange import AnswerWriter, EventStream, collected, submitted, whole
from .intake import KEY, TAKEN, Intake
from .kept import KeptItems
from .prompts import Prompts
from .schema import (
    SAMPLERS,
    ChatRequest,
    FormRequest,
    PoolFields,
    TemplateRequest,
    _Sampled,
    parse,
    text_of_content,
)
from .settings import ServerSettings
from .speed import TokenSpeed
from .usage import overflow_header, preview_header, together

if TYPE_CHECKING:
    from ..llama.embedding import Embedder

T = TypeVar("T")


class Front(Intake):
    """What the endpoints of one model share."""

    def __init__(
        self, settings: ServerSettings, scheduler: Scheduler, prompts: Prompts, embedder: Embedder | None = None
    ) -> None:
        super().__init__(settings, values=max(bodies.MAX_VALUES, 2 * scheduler.model.n_ctx))
        self.scheduler = scheduler
        self.prompts = prompts
        self.embedder = embedder
        self.viewers: Counter[str] = Counter()  # by key
        self.speed = TokenSpeed(scheduler)
        self.items = KeptItems()

    async def engine(self, work: Callable[[], T], *, looks: bool = False) -> T:
        """Run on the engine's thread, see `Scheduler.call`. ApiError for a wrong value, or a text that is busy."""
        try:
            return await asyncio.wrap_future(self.scheduler.call(work, looks=looks))
        except ConversationBusy as err:
            raise ApiError(409, str(err), code="conversation_busy") from None
        except ConfigError as err:
            raise ApiError(400, str(err), code="invalid_value") from None

    async def asked(self, http: HttpRequest, kind: type[Any]) -> Any:
        """Return the request of this kind in a body; see `body`. The header of the answer names its unknown fields.

        ApiError while the server is draining, too.
        """
        data = await self.received(http, *([forms.MEDIA_TYPE] if issubclass(kind, FormRequest) else []))
        self.admit()
        return await self.work(http, self._asked, http, kind, data)

    def _asked(self, http: HttpRequest, kind: type[Any], data: bytearray) -> Any:
        given = self.parsed(http, data, form=issubclass(kind, FormRequest))
        asked, http.scope[fields.IGNORED] = parse(kind, given, strict=self.settings.strict)
        return asked

    def access(self, request: HttpRequest) -> Access:
        """Return which conversations a request may use: with --isolate-keys those of its key, else all."""
        settings = self.settings
        return Access.of(request.scope.get(KEY, "")) if settings.isolate_keys and settings.keys else Access()

    def salt(self, http: HttpRequest, asked: TemplateRequest | _Sampled) -> str:
        """Return the salt of what is kept of a request: its text, rendered chat, images and sounds, and grammar."""
        pool = asked.kvflash if isinstance(asked, _Sampled) else PoolFields.model_construct()
        return self.access(http).salt(pool.cache_salt)

    def make(
        self,
        http: HttpRequest,
        asked: _Sampled,
        tokens: list[int],
        *,
        kind: str,
        max_tokens: int,
        logprobs: int | None = None,
        prompt_logprobs: bool = False,
        grammar: Grammar | str | None = None,
        shared_until: int = 0,
        stops: tuple[str, ...] = (),
        preserved: Mapping[int, bytes] = MappingProxyType({}),
        images: tuple[Image, ...] = (),
        left_out: int = 0,
    ) -> Request:
        """Return the request for the scheduler. ApiError if the prompt is empty or has no room in the context.

        max_tokens: of the answer, below 0 for --max-tokens-default. prompt_logprobs: it needs `logprobs`; all of the
        prompt is read, exactly unless another reading is asked for. On a thread of the front's, since texts of
        `logit_bias` are tokenised.
        """
        n_ctx, settings, pool = self.scheduler.model.n_ctx, self.settings, asked.kvflash
        if not tokens:
            raise invalid(asked.ASKS, "it is empty")
        if len(tokens) + 1 > n_ctx:
            raise ApiError(
                400,
                # Claude Code shortens its history where it reads these words
                f"prompt is too long: {len(tokens)} tokens > {n_ctx} maximum, with the answer: {self._longer(asked)}",
                code="context_length_exceeded",
                param=asked.ASKS,
                more={"n_prompt_tokens": len(tokens), "n_ctx": n_ctx},
            )
        for lo, hi in pool.pins:
            if not 0 <= lo < hi <= len(tokens):
                raise invalid("kvflash.pins", f"[{lo}, {hi}) is no range of the prompt's {len(tokens)} tokens")
        model = self.scheduler.model
        for name, value, possible in (
            ("reading", pool.reading, model.readings), ("answer", pool.answer, model.answers),
        ):  # fmt: skip
            if value is not None and value not in possible:
                here = f"it can be {' or '.join(possible)} here, not {value!r}"
                raise invalid(f"kvflash.{name}", f"{here}: start the server with --kvflash-{name} {value}")
        if pool.reading == PREVIEW:
            _check_preview(asked, tokens, kind=kind, grammar=grammar, prompt_logprobs=prompt_logprobs)
        reading = pool.reading
        if prompt_logprobs and reading is None:
            reading = "exact"
            if reading not in model.readings:
                raise ApiError(
                    501,
                    "echo with logprobs reads prompts exactly, and this server has no layer buffers: start it with "
                    '--kvflash-reading exact, or ask for the pool\'s numbers with "kvflash": {"reading": "pool"}',
                    code="not_served",
                    param="echo",
                )
        if asked.id_slot is not None and asked.id_slot >= 0 and len(self.scheduler.slots) > 1:
            fields.note(http, [f"id_slot={asked.id_slot}"])
        key = http.scope.get(KEY, "")
        reuse = pool.cache_prompt and asked.cache_prompt is not False and not prompt_logprobs
        return Request(
            id=f"{kind}-{secrets.token_hex(12)}",
            tokens=np.array(tokens, np.int32),
            max_tokens=self.most(max_tokens),
            sampling=self._sampling(asked, grammar),
            stop=(*asked.stop, *stops),
            ignore_eos=asked.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            conversation=pool.conversation,
            salt=self.salt(http, asked),
            key=key,
            priority=pool.priority,
            timeout_s=settings.timeout_s,
            queue_timeout_s=settings.queue_timeout_s,
            reuse=reuse,
            shared_until=min(shared_until, len(tokens) - 1),
            pins=tuple(pool.pins),
            reading=reading,
            answer=pool.answer,
            drafts=pool.drafts,
            messages=_texts(asked),
            preserved=preserved,
            images=images,
            left_out=left_out,
        )

    def rolls(self, pool: PoolFields) -> bool:
        """Tell whether a chat that outgrows the context loses its oldest messages."""
        return (pool.overflow or self.settings.overflow) == "roll"

    def most(self, max_tokens: int) -> int:
        """Return how many tokens an answer may have. max_tokens: as its request says, below 0 for the server's."""
        wanted = self.settings.default_tokens if max_tokens < 0 else max_tokens
        wanted = self.scheduler.model.n_ctx if wanted < 0 else wanted
        return wanted if self.settings.most_tokens is None else min(wanted, self.settings.most_tokens)

    def _longer(self, asked: _Sampled) -> str:
        """Say what helps where a prompt outgrows the context."""
        trained = self.prompts.facts.get("n_ctx_train", 0)
        more = f"up to {trained}, and beyond that with --yarn" if trained > self.scheduler.model.n_ctx else "and --yarn"
        if isinstance(asked, ChatRequest) and self.rolls(asked.kvflash):
            alone = "the system message and the newest turn do not fit alone"
            return f"{alone}: start the server with a larger -c, {more}; or shorten them"
        rolls = ", or with --overflow roll" if isinstance(asked, ChatRequest) else ""
        return f"start the server with a larger -c, {more}{rolls}; or shorten it"

    def _sampling(self, asked: _Sampled, grammar: Grammar | str | None) -> Sampling:
        usual, bias = self.settings.sampling, dict[int, float]()
        for token, value in (asked.logit_bias or {}).items():
            number = token.isdecimal() and token.isascii()
            if number and (len(token) > 9 or int(token) >= self.prompts.n_vocab):
                raise invalid("logit_bias", f"{token[:20]!r} is no token")
            plain = partial(self.prompts.tokenize, add_special=False, parse_special=False)
            bias |= dict.fromkeys([int(token)] if number else plain(token), value)
        given = {name: getattr(asked, name) for name in SAMPLERS}
        values = {name: getattr(usual, name) if value is None else value for name, value in given.items()}
        values["top_k"] = max(0, values["top_k"])
        seed = secrets.randbits(32) if asked.seed is None or asked.seed < 0 else asked.seed & 0xFFFFFFFF
        return Sampling(**values, seed=seed, logit_bias=bias, grammar=grammar)

    async def format_grammar(self, http: HttpRequest, asked: _Sampled) -> str | None:
        """Return a checked grammar for the form that a request asks for: its own, of its schema, any JSON, or none."""
        form, schema, text = asked.response_format, asked.json_schema, asked.grammar or None
        try:
            found = schema_of(form.model_dump(by_alias=True)) if form is not None else None
        except ConfigError as err:
            raise invalid("response_format", str(err)) from None
        if found is not None and schema is not None:
            raise invalid("json_schema", "it excludes response_format")
        found = found if schema is None else (schema, False)
        if text is not None and found is not None:
            raise invalid("grammar", "it excludes a JSON format")
        salt = self.salt(http, asked)
        if found is not None:
            where = "response_format" if schema is None else "json_schema"
            return await self.work(http, self._schema_grammar, http, *found, where, salt)
        if text is not None:
            await self.work(http, self.check_grammar, text, "grammar", salt)
        return text

    def check_grammar(self, grammar: Grammar | str, where: str, salt: str) -> None:
        """Raise ApiError for a grammar that cannot be used. where: the field that it is of. On a thread of the front's.

        salt: of the request, see `Prompts.check_grammar`.
        """
        with blaming(where):
            self.prompts.check_grammar(grammar, salt)

    def _schema_grammar(self, http: HttpRequest, schema: Any, strict: bool, where: str, salt: str) -> str:
        grammar, ignored = self.prompts.schema_grammar(schema, strict=strict, where=where)
        fields.note(http, ignored)
        try:
            self.prompts.check_grammar(grammar, salt)
        except ConfigError as err:
            raise invalid(
                where,
                f"this JSON schema makes a grammar that is too large, or that refers to itself without end: lower its "
                f"maxItems and repetitions ({str(err)[:160]})",
            ) from err
        return grammar

    async def respond(
        self,
        http: HttpRequest,
        requests: Sequence[Request],
        answers: Sequence[AnswerWriter],
        *,
        each: int,
        stream: bool,
    ) -> Response:
        """Queue all requests or none, and answer them as a stream or as a whole. each: answers to a prompt.

        Requests behind the first wait for each other, which --queue-timeout does not count. ApiError without room.
        """
        never = self.scheduler.waiting.never([len(request.tokens) for request in requests])
        if never is not None:
            raise invalid("n", never)
        first, *others = requests
        others = [replace(other, queue_timeout_s=None) for other in others]
        exchanges = submitted(self.scheduler, [first, *others], http.receive)
        http.scope[TAKEN] = True
        for answer in answers:
            answer.tell(first.left_out)
        headers = overflow_header(first.left_out)
        if stream:
            ping_s, stall_s = self.settings.ping_s, self.settings.stall_timeout_s
            work = partial(self.work, http)
            return EventStream(
                exchanges, answers, each=each, ping_s=ping_s, stall_s=stall_s, work=work, headers=headers
            )
        ended = await collected(exchanges, answers)
        headers |= preview_header(together(ended, each=each).usage.preview)
        return await self.work(http, lambda: answers[0].response(whole(answers, ended, each=each), headers))


def _texts(asked: _Sampled) -> tuple[tuple[str, str], ...]:
    """Return role and text of each message of a chat."""
    messages = asked.messages if isinstance(asked, ChatRequest) else ()
    return tuple((message.role, text_of_content(message.content)) for message in messages)


def _check_preview(
    asked: _Sampled, tokens: Sequence[int], *, kind: str, grammar: Grammar | str | None, prompt_logprobs: bool
) -> None:
    """Raise ApiError for a request that needs all of its prompt, or whose interface cannot mark a preview."""
    pool = asked.kvflash
    refused = {
        "this interface": kind not in ("chatcmpl", "cmpl"),
        "tools": isinstance(asked, ChatRequest) and bool(asked.tools),
        "a grammar or a response format": grammar is not None,
        f"kvflash.answer {pool.answer!r}": pool.answer not in (None, "pool"),
        "kvflash.pins": bool(pool.pins),
        "echo and logprobs": prompt_logprobs,
        "images": min(tokens) < 0,
    }
    for what, asked_for in refused.items():
        if asked_for:
            refusal = f"'preview' answers from a part of the prompt, and not together with {what}"
            raise invalid("kvflash.reading", f"{refusal}: leave out one of them")


def several(request: Request, count: int) -> list[Request]:
    """Return a request for each of `count` answers to one prompt, each with random numbers of its own."""
    seed = request.sampling.seed
    samplings = [replace(request.sampling, seed=(seed + i) & 0xFFFFFFFF) for i in range(count)]
    return [replace(request, id=f"{request.id}-{i}" if i else request.id, sampling=s) for i, s in enumerate(samplings)]
