"""Errors for clients, in the shape of each interface."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from starlette.responses import Response

from ..batching import messages
from ..chat.schemas import SchemaError
from ..errors import ConfigError, ContextFull

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    501: "not_supported_error",
    503: "unavailable_error",
    504: "timeout_error",
}

_ANTHROPICS_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

ANTHROPICS_PATHS = ("/v1/messages", "/messages")
"""What lies at or below them answers as Anthropic's interface does, errors too."""

OLLAMAS_PATH = "/api/"
"""What lies below it answers as Ollama does."""

_STATUS = {
    messages.CANCELLED: 499,
    messages.DEADLINE: 504,
    messages.QUEUE_DEADLINE: 503,
    messages.CONTEXT: 400,
    messages.INVALID: 400,
    messages.INTERNAL: 500,
    messages.NUMERICAL: 500,
    messages.SHUTDOWN: 503,
}


class ApiError(Exception):
    """An error for a client. status: of HTTP. code: for programs. param: the wrong field. retry_after_s: in seconds.

    more: further fields of the body, as llama-server has them.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.more = more

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code, **self.more}}

    @property
    def anthropics_body(self) -> dict[str, Any]:
        kind = _ANTHROPICS_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    @property
    def ollamas_body(self) -> dict[str, Any]:
        return {"error": self.message}

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """Return the error with the field as the client calls it. names: by those of a chat.

        Messages of a chat are not the client's one by one, so their numbers are left out.
        """
        param, message = self.param or "", self.message
        first, dot, rest = param.partition(".")
        if first not in names:
            return self
        if first == "messages":
            said = names[first]
            message = said + message[len(param) :] if message.startswith(param) else message
        else:
            said, message = f"{names[first]}{dot}{rest}", message.replace(first, names[first])
        return ApiError(
            self.status, message, code=self.code, param=said, retry_after_s=self.retry_after_s, more=self.more
        )

    def response(self, path: str) -> Response:
        """Return the answer. path: of the request; it says which shape the client reads."""
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
            headers["Retry-After-Ms"] = str(math.ceil(self.retry_after_s * 1e3))  # which OpenAI's client prefers
        if self.status == 501:
            headers["X-Should-Retry"] = "false"  # OpenAI's client asks again otherwise
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        body = self.body
        if path.startswith(ANTHROPICS_PATHS):
            body = self.anthropics_body
        elif path.startswith(OLLAMAS_PATH):
            body = self.ollamas_body
        return Response(json.dumps(body), self.status, headers, media_type="application/json")


def invalid(param: str, why: str) -> ApiError:
    """Make the error for a field whose value cannot be used."""
    return ApiError(400, f"{param}: {why}", code="invalid_value", param=param)


@contextmanager
def blaming(param: str | None) -> Iterator[None]:
    """Turn what a user can do wrong into an ApiError. param: the wrong field, unless a schema's error says."""
    try:
        yield
    except ContextFull as err:
        raise ApiError(400, str(err), code="context_length_exceeded", param=param) from None
    except SchemaError as err:
        raise ApiError(400, str(err), code="invalid_schema", param=err.where) from None
    except ConfigError as err:
        raise ApiError(400, str(err), code="invalid_value", param=param) from None


def shutting_down() -> ApiError:
    """Make the error for what comes while the server drains."""
    return ApiError(503, "the server is shutting down: try again later", code="draining", retry_after_s=30)


def from_failure(failed: messages.Failed, *, retry_after_s: float) -> ApiError:
    """Return the error for the client of an answer that failed."""
    status = _STATUS.get(failed.code, 500)
    again = retry_after_s if status == 503 else None
    return ApiError(status, failed.message, code=failed.code, retry_after_s=again)
