"""`/v1/audio/transcriptions`: a file of sound as a chat, and the answer as the text that was heard."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import ConfigDict, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..batching.messages import Event, Finished, Usage
from .chat import prepared
from .errors import ApiError
from .exchange import AnswerWriter, frame
from .fields import NAMES
from .front import Front
from .images import SOUND
from .schema import ChatRequest, FormRequest, Whole, parse

ASK = "Transcribe audio to text"
"""What llama-server asks, where the request has no prompt."""

_NAMES = {"messages": "file"}
"""What the chat's messages are called here."""


class TranscriptionRequest(FormRequest):
    """A form: its values are texts. prompt: replaces the question to the model, as in llama-server."""

    model_config = ConfigDict(strict=False)

    file: bytes
    language: str | None = Field(None, max_length=64)
    prompt: str = ""
    response_format: Literal["json", "text"] = "json"
    temperature: float = Field(0.0, ge=0, le=10)
    max_tokens: Whole = Field(-1, ge=-1)
    stream: bool = False


async def transcriptions(front: Front, http: HttpRequest, asked: TranscriptionRequest) -> Response:
    """Write what is said in a file of sound. Needs --mmproj with an audio encoder."""
    chat = await front.work(http, _translated, http, asked)
    requests, rendered = await prepared(front, http, chat, kind="asr")
    answer = TranscriptionAnswer(asked, rendered.reader())
    return await front.respond(http, requests, [answer], each=1, stream=asked.stream)


def _translated(http: HttpRequest, asked: TranscriptionRequest) -> ChatRequest:
    question = asked.prompt or ASK
    if asked.language:
        question += f" (language: {asked.language})"
    sound = {"type": SOUND, SOUND: {"data": base64.b64encode(asked.file).decode()}}
    said = [{"role": "user", "content": [{"type": "text", "text": question}, sound]}]
    given = {name: getattr(asked, name) for name in ("temperature", "max_tokens")}
    http.scope[NAMES] = _NAMES
    chat: ChatRequest = parse(ChatRequest, {"messages": said, "enable_thinking": False, **given}, strict=False)[0]
    return chat


class TranscriptionAnswer(AnswerWriter):
    """Events as OpenAI's: deltas of the transcript, and all of it at the end."""

    @property
    def _content(self) -> str:
        return self._reader.said.content.strip()

    def choice(self, finished: Finished) -> dict[str, Any]:
        self._said(finished)
        return {"text": self._content, "usage": _usage(finished.usage)}

    def whole(self, choices: Any, finished: Finished) -> Any:
        return choices[0]

    def response(self, value: Any, headers: Mapping[str, str]) -> Response:
        if self._asked.response_format == "text":
            return Response(f"{value['text']}\n", headers=dict(headers), media_type="text/plain; charset=utf-8")
        return super().response(value, headers)

    def frames(self, event: Event) -> Iterator[bytes]:
        for delta in self._deltas(event):
            if delta.content:
                yield frame({"delta": delta.content}, "transcript.text.delta")
        if isinstance(event, Finished):
            yield frame({"text": self._content, "usage": _usage(event.usage)}, "transcript.text.done")

    def failed(self, error: ApiError) -> bytes:
        return frame(error.body, "error")


def _usage(took: Usage) -> dict[str, Any]:
    return {
        "type": "tokens",
        "input_tokens": took.prompt,
        "output_tokens": took.generated,
        "total_tokens": took.prompt + took.generated,
        "input_token_details": {"cached_tokens": took.cached},
    }
