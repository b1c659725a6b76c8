"""Events of an answer as OpenAI's chat objects."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ..batching.messages import Event, Finished, Logprob, Piece
from .exchange import DONE, Answer, dumps, frame
from .schema import ChatRequest
from .took import FINGERPRINT, report, timings, usage
from .tools import CallReader, ToolPlan, made_call


class ChatAnswer(Answer):
    """Events as OpenAI's chat objects: chunks of a stream, or one of the whole."""

    def __init__(self, alias: str, id: str, asked: ChatRequest, tools: ToolPlan, *, index: int) -> None:
        self._alias, self._id, self._asked, self._tools, self._index = alias, id, asked, tools, index
        self._created = int(time.time())
        self._reader = CallReader() if tools.reads else None
        self._text: list[str] = []
        self._logprobs: list[Logprob] = []
        self._calls: list[dict[str, Any]] = []
        if tools.named is not None:
            self._calls.append(made_call(tools.named, ""))
        self._head = (
            f'data: {{"id":{dumps(id)},"object":"chat.completion.chunk","created":{self._created},'
            f'"model":{dumps(alias)},"system_fingerprint":"{FINGERPRINT}","choices":[{{"index":{index},"delta":'
        )

    def take(self, event: Event) -> None:
        """For one of the whole."""
        if isinstance(event, Piece):
            self._logprobs += event.logprobs
            self._text.append(event.text)

    def choice(self, finished: Finished) -> dict[str, Any]:
        text = "".join(self._text)
        if self._tools.named is not None:
            self._calls[0]["function"]["arguments"] = text
            text = ""
        elif self._reader is not None:
            text, self._calls = self._reader.push(text, end=True)
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not self._calls else None}
        if self._calls:
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in self._calls]
        return {
            "index": self._index,
            "message": message,
            "logprobs": _chat_logprobs(self._logprobs) if self._asked.logprobs else None,
            "finish_reason": self._reason(finished),
        }

    def whole(self, choices: Sequence[dict[str, Any]], finished: Finished) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._alias,
            "system_fingerprint": FINGERPRINT,
            "choices": list(choices),
            "usage": usage(finished.usage),
            "timings": timings(finished.usage),
            **report(self._asked.kvflash.report, finished),
        }

    def chunk(self, delta: dict[str, Any], *, logprobs: Sequence[Logprob] = (), reason: str | None = None) -> bytes:
        told = dumps(_chat_logprobs(logprobs)) if logprobs else "null"
        return f'{self._head}{dumps(delta)},"logprobs":{told},"finish_reason":{json.dumps(reason)}}}]}}\n\n'.encode()

    def opening(self) -> bytes:
        return self.chunk({"role": "assistant", "content": "" if self._tools.named is None else None})

    def frames(self, event: Event) -> Iterator[bytes]:
        if isinstance(event, Piece):
            yield from self._piece(event.text, event.logprobs)
        elif isinstance(event, Finished):
            yield from self._piece("", (), end=True)
            yield self.chunk({}, reason=self._reason(event))

    def ending(self, finished: Finished) -> Iterator[bytes]:
        last = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._alias,
            "system_fingerprint": FINGERPRINT,
            "choices": [],
            "timings": timings(finished.usage),
            **report(self._asked.kvflash.report, finished),
        }
        options = self._asked.stream_options
        if options is not None and options.include_usage:
            yield frame({**last, "usage": usage(finished.usage)})
        elif self._asked.kvflash.report != "none" or self._asked.timings_per_token:
            yield frame(last)
        yield DONE

    def _piece(self, text: str, logprobs: Sequence[Logprob], *, end: bool = False) -> Iterator[bytes]:
        if self._tools.named is not None:
            call = {"index": 0, "function": {"arguments": text}}
            if self._calls[0]["function"]["arguments"] == "":
                call = {**self._calls[0], "function": {"name": self._tools.named, "arguments": text}}
            self._calls[0]["function"]["arguments"] += text
            if text:
                yield self.chunk({"tool_calls": [call]}, logprobs=logprobs)
            return
        calls: list[dict[str, Any]] = []
        if self._reader is not None:
            text, calls = self._reader.push(text, end=end)
        if text or logprobs:
            yield self.chunk({"content": text}, logprobs=logprobs)
        for made in calls:
            self._calls.append(made)
            yield self.chunk({"tool_calls": [made]})

    def _reason(self, finished: Finished) -> str:
        if finished.reason == "stop" and self._calls and self._tools.named is None:
            return "tool_calls"
        return finished.reason


def _chat_logprobs(told: Sequence[Logprob]) -> dict[str, Any]:
    return {
        "content": [
            {
                **_token(one.piece, one.logprob),
                "top_logprobs": [_token(piece, logprob) for _, piece, logprob in one.top],
            }
            for one in told
        ],
        "refusal": None,
    }


def _token(piece: bytes, logprob: float) -> dict[str, Any]:
    return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}
