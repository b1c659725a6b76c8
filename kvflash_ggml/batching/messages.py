"""What goes to the thread of the engine and what comes back, as plain values, and which texts a request may see."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..arrays import Int32s
from ..chat.values import Grammar
from ..sampling import Samplers


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(Samplers):
    """How the next token is chosen. grammar: a chat's, or GBNF; checked before it comes here; None for any text."""

    seed: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: Grammar | str | None = None


class Image(Protocol):
    """An image or a sound of a prompt. tokens: what stands for it there."""

    @property
    def tokens(self) -> Sequence[int]: ...

    def load(self) -> None:
        """Have its rows known to the steps that come, which encode it if they read them. On the engine's thread."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One answer that is asked for.

    tokens: the prompt. logprobs: how many alternatives to tell of each token, None for none of it. prompt_logprobs: are
    the prompt's tokens told too? All of them are read then, so `reuse` must be False. conversation: a hint which text
    to go on from; the tokens decide. salt: only texts of the same salt are gone on from. key: whose it is; keys take
    turns. priority: higher ones first. timeout_s, queue_timeout_s: from submission, None for no limit. reuse: may it go
    on from what is known, and be gone on from? shared_until: how many of its tokens other requests will probably begin
    with, 0 if that is not known. pins: token ranges that stay on the device. reading, answer: what tokens of the prompt
    and of the answer see, one of the model's `readings` and `answers`, None for its usual way; reading="preview"
    answers a long prompt from a part of it, and all of it is read behind the answer. drafts: may they be verified?
    messages: role and text of each message of the prompt, to say which one differs from a text that is known.
    preserved: special tokens that the answer shows, and how. images: of the prompt, and its sounds. left_out: how many
    of the chat's oldest messages the prompt leaves out.
    """

    id: str
    tokens: Int32s
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: bool = False
    conversation: str | None = None
    salt: str = ""
    key: str = ""
    priority: int = 0
    timeout_s: float | None = None
    queue_timeout_s: float | None = None
    reuse: bool = True
    shared_until: int = 0
    pins: tuple[tuple[int, int], ...] = ()
    reading: str | None = None
    answer: str | None = None
    drafts: bool = True
    messages: tuple[tuple[str, str], ...] = ()
    preserved: Mapping[int, bytes] = field(default_factory=dict)
    images: tuple[Image, ...] = ()
    left_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """A token: its bytes and the log of its probability, before any sampling. top: the likeliest.

    logprob: None for the first token of a prompt, which follows nothing.
    """

    token: int
    piece: bytes
    logprob: float | None
    top: tuple[tuple[int, bytes, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """Why messages were read again: `message`, of this role, differs from the kept text from `at_token` on."""

    at_token: int
    message: int
    role: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """An answer comes from a part of its prompt: `read` of `prompt` tokens."""

    read: int
    prompt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What an answer took. cached: tokens of the prompt that were not read again. missed: why not more, None where only
    the last message was new. preview: None for an answer that is none. Times in seconds.
    """

    prompt: int = 0
    cached: int = 0
    generated: int = 0
    queue_s: float = 0.0
    restore_s: float = 0.0
    prompt_s: float = 0.0
    generation_s: float = 0.0
    missed: Missed | None = None
    preview: Preview | None = None


@dataclass(slots=True)
class Totals:
    """Since the start. finished: answers by how they ended. missed: see `Usage`."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    missed: int = 0
    finished: dict[str, int] = field(default_factory=dict)

    def add(self, usage: Usage, reason: str) -> None:
        """Count a request that has ended."""
        self.prompt_tokens += usage.prompt
        self.cached_tokens += usage.cached
        self.generated_tokens += usage.generated
        self.missed += usage.missed is not None
        self.finished[reason] = self.finished.get(reason, 0) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The request has the slot. conversation: the name of the text that it continues. preview: see `Usage`."""

    conversation: str
    preview: Preview | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """More of the answer: text that is final, and what is to be told of its tokens."""

    text: str
    logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The answer has ended. reason: "stop", or "length" at a limit. stop: the stop string it ended at.

    report: of the pool while it was made, for those who ask.
    """

    reason: str
    usage: Usage
    stop: str | None = None
    tokens: tuple[int, ...] = ()
    report: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """There is no more to come. code: one of those below; message: for the user."""

    code: str
    message: str


Event = Started | Piece | Finished | Failed

CANCELLED, DEADLINE, QUEUE_DEADLINE, CONTEXT, INVALID, INTERNAL, NUMERICAL, SHUTDOWN = (
    "cancelled",
    "timeout",
    "queue_timeout",
    "context_length_exceeded",
    "invalid_value",
    "internal_error",
    "numerical",
    "shutdown",
)
"""Codes of `Failed`."""


# --- the rule that keeps texts apart


@dataclass(frozen=True, slots=True)
class Access:
    """A request's access to conversations. Everything that shows or touches a conversation asks `may` with its salt.

    owner: how the salts of the request's own conversations begin; "" where all conversations are everybody's.
    """

    owner: str = ""

    @classmethod
    def of(cls, key: str) -> Access:
        """Make an access to the conversations of one key only."""
        return cls(_digest(key, ""))

    def may(self, salt: str) -> bool:
        """Tell whether the request may see and touch a conversation of this salt."""
        return salt.startswith(self.owner)

    def salt(self, cache_salt: str) -> str:
        """Return the salt of this request's own conversations. cache_salt: chosen by the client, "" for none."""
        return self.owner + (_digest("", cache_salt) if cache_salt else "")


def _digest(key: str, salt: str) -> str:
    return hashlib.sha256(f"{key}\0{salt}".encode("utf-8", "surrogatepass")).hexdigest()[:16]
