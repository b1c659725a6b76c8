"""Writes an answer as OpenAI's chat objects."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..batching.messages import Event, Finished, Logprob, Piece, Started
from ..chat.reader import Rendered
from .errors import ApiError
from .exchange import ChoiceAnswer, dumps
from .schema import ChatRequest, ToolChoice
from .usage import heading, marked


class ChatAnswer(ChoiceAnswer):
    """Events as OpenAI's chat objects: chunks of a stream, or one of the whole."""

    def __init__(self, alias: str, id: str, asked: ChatRequest, rendered: Rendered, *, index: int) -> None:
        super().__init__(asked, rendered.reader(), base=heading(id, "chat.completion", alias), index=index)
        self._chunk = {**self._base, "object": "chat.completion.chunk"}
        self._head = f'data: {dumps(self._chunk)[:-1]},"choices":[{{"index":{index},"delta":'

    def choice(self, finished: Finished) -> dict[str, Any]:
        return {
            "index": self._index,
            "message": self._said(finished).as_openai(),
            "logprobs": _chat_logprobs(self._logprobs) if self._asked.logprobs else None,
            "finish_reason": self._reason(finished),
        }

    def chunk(
        self,
        delta: dict[str, Any],
        *,
        logprobs: Sequence[Logprob] = (),
        reason: str | None = None,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> bytes:
        probabilities = dumps(_chat_logprobs(logprobs)) if logprobs else "null"
        rest = f",{dumps(more)[1:-1]}" if more else ""
        choice = f'{dumps(delta)},"logprobs":{probabilities},"finish_reason":{json.dumps(reason)}'
        return f"{self._head}{choice}}}]{rest}}}\n\n".encode()

    def opening(self) -> bytes:
        return self.chunk({"role": "assistant", "content": ""})

    def frames(self, event: Event) -> Iterator[bytes]:
        if isinstance(event, Started) and event.preview is not None:
            yield self.chunk({}, more=marked(event.preview))
        elif isinstance(event, Piece):
            yield from self._piece(event.text, event.logprobs)
        elif isinstance(event, Finished):
            yield from self._piece("", (), end=True, stopped=event.reason == "stop")
            yield self.chunk({}, reason=self._reason(event))

    def failed(self, error: ApiError) -> bytes:
        return b"".join(self._piece("", (), end=True)) + super().failed(error)

    def _piece(
        self, text: str, logprobs: Sequence[Logprob], *, end: bool = False, stopped: bool = False
    ) -> Iterator[bytes]:
        deltas = [delta.as_openai() for delta in self._reader.push(text, end=end, stopped=stopped)]
        if logprobs and not deltas:
            deltas = [{"content": ""}]
        for i, delta in enumerate(deltas):
            yield self.chunk(delta, logprobs=() if i else logprobs)

    def _reason(self, finished: Finished) -> str:
        """A function that the client has named is called anyway; so says OpenAI's API."""
        called = self._reader.called and not isinstance(self._asked.tool_choice, ToolChoice)
        return "tool_calls" if finished.reason == "stop" and called else finished.reason


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
