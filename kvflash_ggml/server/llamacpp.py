"""llama-server's own endpoints, as far as they make sense with a pool."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from ..batching.messages import Access, Event, Finished, Logprob, Piece, Request
from ..batching.slot import Slot
from ..errors import KVFlashError
from . import turns
from .chat import render
from .completions import check_gap, gap_tokens, known_tokens, prompt_tokens, prompts_of, text_of
from .errors import ApiError, blaming, invalid
from .exchange import AnswerWriter, dumps, frame
from .front import Front, several
from .schema import DetokenizeRequest, InfillRequest, RawRequest, TemplateRequest, TokenizeRequest
from .usage import generation_settings, timings

MOST_TOKENS = 1 << 16
"""That /detokenize writes at once, or as many as the context has."""


async def slots(front: Front, request: HttpRequest) -> Response:
    """List the slots: which are busy, and how many tokens each has."""
    scheduler, access = front.scheduler, front.access(request)
    free = any(slot.request is None for slot in scheduler.slots)
    if not free and request.query_params.get("fail_on_no_slot") == "1":
        raise ApiError(503, "no slot is free", code="no_slot", retry_after_s=scheduler.retry_after_s)
    return JSONResponse([_described(i, slot, access) for i, slot in enumerate(scheduler.slots)])


def _described(number: int, slot: Slot, access: Access) -> dict[str, Any]:
    running, mine = slot.request, slot.conversation
    length = slot.model.counters()["length"]
    may = not access.owner or (mine is not None and access.may(mine.salt) and slot.conversation is mine)
    return {
        "id": number,
        "n_ctx": slot.model.n_ctx,
        "is_processing": running is not None,
        "n_tokens": length if may else 0,
        "id_task": running.id if running is not None and access.may(running.salt) else None,
    }


async def slot_action(front: Front, request: HttpRequest) -> Response:
    """Save, restore or erase the text in a slot. Files lie in the session folder."""
    all_slots, wanted = front.scheduler.slots, request.path_params["id"]
    number = int(wanted) if wanted.isdecimal() and len(wanted) <= 9 else -1
    if not 0 <= number < len(all_slots):
        there = "there is one slot: 0" if len(all_slots) == 1 else f"there are slots 0 to {len(all_slots) - 1}"
        raise ApiError(404, there, code="no_slot")
    slot = all_slots[number]
    action, access, scheduler = request.query_params.get("action"), front.access(request), front.scheduler
    began = time.monotonic()
    if action == "erase":
        erased = await front.engine(lambda: scheduler.conversations.erase_running(access, slot))
        return JSONResponse({"id_slot": number, "n_erased": erased})
    if action not in ("save", "restore"):
        raise invalid("action", "it must be save, restore or erase")
    name = turns.text_of(await front.body(request), "filename", "")
    if scheduler.folder is None:
        raise ApiError(501, "sessions are saved in --session-dir: start the server with it", code="no_session_dir")
    try:
        if action == "save":
            saved = await front.engine(lambda: scheduler.conversations.save_running(name, access, slot))
            if saved is None:
                raise ApiError(404, "no text of this key is at hand: send its request again first", code="no_text")
            done = dict(zip(("n_saved", "n_written"), saved, strict=True))
        else:
            restored = await front.engine(lambda: scheduler.conversations.load_running(name, access, slot))
            if restored is None:
                raise ApiError(404, f"there is no saved session {name!r}", param="filename")
            done = {"n_restored": restored}
    except KVFlashError as err:  # where the folder is concerns its owner only
        raise ApiError(400, str(err).replace(f"{scheduler.folder.path}/", ""), code="snapshot") from None
    took = round((time.monotonic() - began) * 1e3, 3)
    return JSONResponse({"id_slot": number, "filename": name, **done, "timings": {f"{action}_ms": took}})


async def tokenize(front: Front, http: HttpRequest, asked: TokenizeRequest) -> Response:
    """Tokenize a text."""
    return await front.work(http, _tokenized, front, asked)


def _tokenized(front: Front, asked: TokenizeRequest) -> Response:
    with blaming("content"):
        tokens = front.prompts.tokenize(asked.content, add_special=asked.add_special, parse_special=asked.parse_special)
    written = {t: _with_piece(front, t) if asked.with_pieces else str(t) for t in set(tokens)}
    return Response(f'{{"tokens":[{",".join(map(written.__getitem__, tokens))}]}}', media_type="application/json")


def _with_piece(front: Front, token: int) -> str:
    data = front.prompts.detokenize([token])
    try:
        return dumps({"id": token, "piece": data.decode()})
    except UnicodeDecodeError:
        return dumps({"id": token, "piece": list(data)})


async def detokenize(front: Front, http: HttpRequest, asked: DetokenizeRequest) -> Response:
    """Write tokens as text."""
    return await front.work(http, _detokenized, front, asked)


def _detokenized(front: Front, asked: DetokenizeRequest) -> Response:
    limit = max(MOST_TOKENS, front.scheduler.model.n_ctx)
    if len(asked.tokens) > limit:
        raise invalid("tokens", f"{len(asked.tokens)}, and {limit} is the most that is written at once: split them")
    text = text_of(front, known_tokens(front, asked.tokens, "tokens"))
    return JSONResponse({"content": text, "prompt": text})


async def tokenizer_info(front: Front, http: HttpRequest) -> Response:
    """Answer what programs that speak to vLLM ask before they let a server tokenize."""
    facts = front.prompts.facts
    marks = {name: facts.get(name) or None for name in ("bos_token", "eos_token")}
    return JSONResponse({"tokenizer_class": "kvflash", **marks, "chat_template": front.prompts.template})


async def apply_template(front: Front, http: HttpRequest, asked: TemplateRequest) -> Response:
    """Render a chat as the prompt that the model would read."""
    return await front.work(http, _templated, front, http, asked)


def _templated(front: Front, http: HttpRequest, asked: TemplateRequest) -> Response:
    return JSONResponse({"prompt": render(front, http, asked)})


async def completion(front: Front, http: HttpRequest, asked: RawRequest) -> Response:
    """Answer a prompt as it stands: text, tokens, or a list of them."""
    prompts = [await front.work(http, prompt_tokens, front, prompt) for prompt in prompts_of(asked)]
    return await _answered(front, http, asked, prompts)


async def infill(front: Front, http: HttpRequest, asked: InfillRequest) -> Response:
    """Write what stands between two texts, for models that were trained to fill gaps."""
    check_gap(front, "/infill")
    tokens = await front.work(
        http,
        gap_tokens,
        front,
        asked.input_prefix,
        asked.input_suffix,
        where=("input_prefix", "input_suffix"),
        files=[(one.filename, one.text) for one in asked.input_extra],
        begun=asked.prompt,
        most=front.settings.default_tokens if asked.n_predict < 0 else asked.n_predict,
    )
    return await _answered(front, http, asked, [tokens])


async def _answered(
    front: Front, http: HttpRequest, asked: RawRequest | InfillRequest, prompts: Sequence[list[int]]
) -> Response:
    grammar, each = await front.format_grammar(http, asked), asked.n or 1
    more: Any = {"max_tokens": asked.n_predict, "logprobs": asked.n_probs or None, "grammar": grammar}
    requests: list[Request] = []
    answers: list[RawAnswer] = []
    for tokens in prompts:
        request = await front.work(http, front.make, http, asked, tokens, kind="raw", **more)
        prompt = await front.work(http, text_of, front, tokens) if "prompt" in asked.response_fields else ""
        for one in several(request, each):
            requests.append(one)
            answers.append(RawAnswer(front, asked, one, prompt, index=len(answers)))
    return await front.respond(http, requests, answers, each=each, stream=asked.stream)


class RawAnswer(AnswerWriter):
    """Events in llama-server's own shape."""

    def __init__(
        self, front: Front, asked: RawRequest | InfillRequest, request: Request, prompt: str, *, index: int
    ) -> None:
        super().__init__(asked)
        self._alias, self._n_ctx = front.settings.alias, front.scheduler.model.n_ctx
        self._slot = 0 if len(front.scheduler.slots) == 1 else -1  # of several, which one is not told
        self._request, self._prompt, self._index = request, prompt, index
        self._lines = False

    def choice(self, finished: Finished) -> dict[str, Any]:
        text = "".join(self._text)
        self._lines = "\n" in text
        return self._chosen({**self._last(finished, text), **self._told(self._logprobs)})

    def whole(self, choices: Sequence[dict[str, Any]], finished: Finished) -> Any:
        return choices[0] if len(choices) == 1 else choices

    def frames(self, event: Event) -> Iterator[bytes]:
        if isinstance(event, Piece):
            self._lines |= "\n" in event.text
            said = {"index": self._index, "content": event.text, "stop": False, "id_slot": self._slot}
            yield frame({**said, **self._told(event.logprobs)})
        elif isinstance(event, Finished):
            yield frame(self._chosen(self._last(event, "")))

    def _told(self, logprobs: Sequence[Logprob]) -> dict[str, Any]:
        if not logprobs:
            return {}
        return {
            "completion_probabilities": [
                {
                    "id": one.token,
                    "token": one.piece.decode("utf-8", "replace"),
                    "bytes": list(one.piece),
                    "logprob": one.logprob,
                    "top_logprobs": [
                        {"id": token, "token": piece.decode("utf-8", "replace"), "bytes": list(piece), "logprob": value}
                        for token, piece, value in one.top
                    ],
                }
                for one in logprobs
            ]
        }

    def _chosen(self, last: dict[str, Any]) -> dict[str, Any]:
        """Return the end of an answer, or the fields of it that the request names."""
        found = {}
        for path in self._asked.response_fields:
            value: Any = last
            for name in path.split("/"):
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None:
                found[path] = value
        return found if self._asked.response_fields else last

    def _last(self, finished: Finished, text: str) -> dict[str, Any]:
        took = finished.usage
        kind = "limit" if finished.reason == "length" else "word" if finished.stop is not None else "eos"
        asked, request = self._asked, self._request
        shown = {"prompt": self._prompt} if "prompt" in asked.response_fields else {}
        return {
            "index": self._index,
            "content": text,
            **shown,
            "tokens": list(finished.tokens) if asked.return_tokens else [],
            "id_slot": self._slot,
            "stop": True,
            "model": self._alias,
            "tokens_predicted": took.generated,
            "tokens_evaluated": took.prompt,
            "tokens_cached": took.cached,
            "stop_type": kind,
            "stopping_word": finished.stop or "",
            "has_new_line": self._lines,
            "truncated": took.prompt + took.generated >= self._n_ctx,
            "generation_settings": {
                **generation_settings(request.sampling, request.max_tokens),
                "stop": list(request.stop),
                "ignore_eos": request.ignore_eos,
                "stream": asked.stream,
                "n_probs": asked.n_probs,
            },
            "timings": timings(finished),
            **self._report(finished),
        }
