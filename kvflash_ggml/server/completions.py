"""`/v1/completions`."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..batching.messages import Event, Finished, Logprob, Piece, Request, Started
from ..errors import ContextFull
from .errors import ApiError, blaming, invalid
from .exchange import ChoiceAnswer, frame
from .front import Front, several
from .schema import MAX_ANSWERS, CompletionRequest, Prompt, RawRequest
from .usage import heading, marked


async def completions(front: Front, http: HttpRequest, asked: CompletionRequest) -> Response:
    """Go on with prompts as OpenAI's older interface does."""
    if asked.best_of not in (None, 1, asked.n):
        raise ApiError(501, f"best_of: {asked.best_of}, and only n is supported: leave it out", param="best_of")
    measured = asked.echo and asked.logprobs is not None
    each, prompts = asked.n or 1, prompts_of(asked)
    grammar = await front.format_grammar(http, asked)
    requests: list[Request] = []
    answers: list[TextAnswer] = []
    for prompt in prompts:
        tokens = await front.work(http, prompt_tokens, front, prompt, suffix=asked.suffix)
        more: Any = {"max_tokens": asked.max_tokens, "logprobs": asked.logprobs, "grammar": grammar}
        more |= {"kind": "cmpl", "prompt_logprobs": measured}
        request = await front.work(http, front.make, http, asked, tokens, **more)
        echoed = await front.work(http, text_of, front, tokens) if asked.echo else ""
        for one in several(request, each):
            requests.append(one)
            answers.append(TextAnswer(front.settings.alias, requests[0].id, asked, echoed, index=len(answers)))
    return await front.respond(http, requests, answers, each=each, stream=asked.stream)


def prompts_of(asked: CompletionRequest | RawRequest) -> list[Prompt]:
    """Return the prompts of a request. ApiError if it asks for more than MAX_ANSWERS answers."""
    count, each = len(asked.prompt), asked.n or 1
    if count * each > MAX_ANSWERS:
        why = f"{count} prompts with {each} answers each, and {MAX_ANSWERS} answers are the most in one request"
        raise invalid("prompt", why)
    return asked.prompt


def text_of(front: Front, tokens: list[int]) -> str:
    """Return tokens as text."""
    return front.prompts.detokenize(tokens).decode("utf-8", "replace")


def prompt_tokens(front: Front, prompt: Prompt, *, where: str = "prompt", suffix: str | None = None) -> list[int]:
    """Return the tokens of one prompt, given as text, as tokens, or as both. On a thread of the front's.

    where: the field that has it. suffix: the text behind a gap that the answer fills. ApiError, 501, if the model
    cannot fill gaps.
    """
    if suffix is not None:
        check_gap(front, "suffix")
        if not isinstance(prompt, str):
            raise invalid("suffix", "it needs a prompt that is a text")
        return gap_tokens(front, prompt, suffix, where=(where, "suffix"))
    n_ctx, tokens = front.scheduler.model.n_ctx, list[int]()
    with blaming(where):
        for i, part in enumerate([prompt] if isinstance(prompt, str) else prompt):
            if isinstance(part, str):
                if len(tokens) > n_ctx:  # the texts that follow could take minutes
                    raise ContextFull(f"the prompt has more than {n_ctx} tokens: start with a larger -c, or shorten it")
                tokens += front.prompts.tokenize(part, add_special=i == 0, parse_special=True)
            else:
                tokens.append(part)
    return known_tokens(front, tokens, where)


def check_gap(front: Front, what: str) -> None:
    """Raise ApiError, 501, if the model cannot fill gaps. what: the field or path that asks for it."""
    if not front.prompts.gap:
        raise ApiError(
            501,
            f"{what} is not served: {front.settings.alias!r} has no FIM tokens, so it cannot fill a gap: serve a model "
            f"that was trained to, such as Qwen2.5-Coder",
            code="not_served",
            param=None if what.startswith("/") else what,
        )


def gap_tokens(
    front: Front,
    prefix: str,
    suffix: str,
    *,
    where: tuple[str, str],
    files: Sequence[tuple[str, str]] = (),
    begun: str = "",
    most: int = 0,
) -> list[int]:
    """Return the prompt that asks a model for the text between `prefix` and `suffix`, as llama-server makes it.

    where: the fields that have the two, for errors. files: name and text of further files; their beginning is left out
    where the context has no room for all of them and `most` tokens of an answer, a quarter of the context for -1.
    begun: the beginning of what fills the gap.
    """
    gap, n_ctx = front.prompts.gap, front.scheduler.model.n_ctx

    def plain(text: str, where: str | None = None) -> list[int]:
        with blaming(where):
            return front.prompts.tokenize(text, add_special=False, parse_special=False)

    extra = [gap["sep"], *plain("filename\n")] if "sep" in gap else []
    for name, text in reversed(files):
        if len(extra) > n_ctx:  # the files before would only take time
            break
        snippet = plain("\n\n--- snippet ---\n\n")
        head = [gap["sep"], *plain(f"{name}\n", "input_extra")] if "sep" in gap else snippet
        extra = [*head, *plain(text, "input_extra"), *extra]
    if "rep" in gap:
        extra = [gap["rep"], *plain("myproject\n"), *extra]
    bos = front.prompts.tokenize("", add_special=True, parse_special=False)
    before, behind = [*plain(prefix, where[0]), *plain(begun, "prompt")], plain(suffix, where[1])
    asked = [gap["pre"], *before, gap["suf"], *behind, gap["mid"]]
    room = max(0, n_ctx - 1 - len(bos) - len(asked) - (most if most >= 0 else n_ctx // 4))
    return [*bos, *extra[max(0, len(extra) - room) :], *asked]


def known_tokens(front: Front, tokens: list[int], where: str) -> list[int]:
    """Check that the model has these tokens. ApiError names the first that it has not."""
    n_vocab = front.prompts.n_vocab
    if tokens and not (min(tokens) >= 0 and max(tokens) < n_vocab):
        wrong = str(next(token for token in tokens if not 0 <= token < n_vocab))[:20]
        raise invalid(where, f"{wrong} is no token: they are from 0 to {n_vocab - 1}")
    return tokens


class TextAnswer(ChoiceAnswer):
    """Events as OpenAI's completion objects."""

    def __init__(self, alias: str, id: str, asked: CompletionRequest, echoed: str, *, index: int) -> None:
        super().__init__(asked, base=heading(id, "text_completion", alias), index=index)
        self._echoed, self._length = echoed, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def choice(self, finished: Finished) -> dict[str, Any]:
        return self._choice("".join([self._echoed, *self._text]), self._logprobs, finished.reason)

    def frames(self, event: Event) -> Iterator[bytes]:
        if isinstance(event, Started) and (self._echoed or event.preview is not None):
            yield frame({**self._base, "choices": [self._choice(self._echoed, (), None)], **marked(event.preview)})
        elif isinstance(event, Piece):
            yield frame({**self._base, "choices": [self._choice(event.text, event.logprobs, None)]})
        elif isinstance(event, Finished):
            yield frame({**self._base, "choices": [self._choice("", (), event.reason)]})

    def _choice(self, text: str, drawn: Sequence[Logprob], reason: str | None) -> dict[str, Any]:
        logprobs = None
        if self._asked.logprobs is not None and drawn:
            offsets = []
            for one in drawn:
                offsets.append(self._length)
                self._length += len(self._decoder.decode(one.piece))  # a character may have several tokens
            logprobs = {
                "tokens": [one.piece.decode("utf-8", "replace") for one in drawn],
                "token_logprobs": [one.logprob for one in drawn],
                "top_logprobs": [_likeliest(one) for one in drawn],
                "text_offset": offsets,
            }
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _likeliest(told: Logprob) -> dict[str, float] | None:
    """Return the likeliest tokens, and the token itself however unlikely. None for the first token of a prompt.

    Tokens of the same text, as halves of characters, have the value of the likeliest among them.
    """
    if told.logprob is None:
        return None
    found: dict[str, float] = {}
    for _, piece, value in (*told.top, (told.token, told.piece, told.logprob)):
        found.setdefault(piece.decode("utf-8", "replace"), value)
    return found
