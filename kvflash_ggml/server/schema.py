"""Requests as they come. What is not named here is refused by its name; what is named and has no effect says so."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import ApiError

Stops = Annotated[list[Annotated[str, Field(max_length=256)]], Field(max_length=16)]
MAX_ANSWERS = 16
"""In one request."""

Bias = dict[str, Annotated[float, Field(ge=-100, le=100)]]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class PoolFields(_Strict):
    """`kvflash` of a request: what only this server knows."""

    cache_prompt: bool = True
    cache_salt: str = Field("", max_length=256)
    conversation: str | None = Field(None, max_length=128)
    priority: int = Field(0, ge=-10, le=10)
    pins: list[tuple[int, int]] = Field(default_factory=list, max_length=64)
    reading: Literal["exact", "pool"] | None = None
    answer: Literal["pool", "exact", "lossless"] | None = None
    drafts: bool = True
    report: Literal["none", "summary"] = "none"


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False


class _Sampled(_Strict):
    """What every request for an answer has. Unset values are the model's usual ones, llama.cpp's."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=10)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, le=1 << 20)
    min_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, ge=0, le=10)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = None
    stop: str | Stops | None = None
    logit_bias: Bias | None = Field(None, max_length=1024)
    n: int | None = Field(None, ge=1, le=MAX_ANSWERS)
    cache_prompt: bool | None = None
    id_slot: int | None = None
    ignore_eos: bool = False
    grammar: str | None = Field(None, max_length=256 << 10)
    kvflash: PoolFields = PoolFields.model_construct()
    # known to OpenAI's clients, without effect here
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    timings_per_token: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class JsonSchema(_Strict):
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    json_object: dict[str, Any] | None = Field(None, alias="schema")


class Message(BaseModel):
    """Other fields go to the template as they are."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class FunctionCalled(_Strict):
    name: str


class ToolChoice(_Strict):
    type: Literal["function"]
    function: FunctionCalled


class Function(_Strict):
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Strict):
    type: Literal["function"]
    function: Function


class ChatRequest(_Sampled):
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=0)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    json_schema: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None


class CompletionRequest(_Sampled):
    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None


class RawRequest(_Sampled):
    """llama-server's own `/completion`."""

    prompt: str | list[int]
    n_predict: int = Field(-1, ge=-1)
    n_probs: int = Field(0, ge=0, le=20)
    json_schema: dict[str, Any] | None = None
    return_tokens: bool = False


class TokenizeRequest(_Strict):
    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(_Strict):
    tokens: list[int]


class TemplateRequest(_Strict):
    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] | None = Field(None, max_length=128)
    chat_template_kwargs: dict[str, Any] | None = None


def parse(kind: type[Any], data: Any) -> Any:
    """A request of this kind. ApiError names the field that is wrong."""
    if not isinstance(data, dict):
        raise ApiError(400, f"the body must be a JSON object, not {type(data).__name__}", code="invalid_json")
    try:
        return kind.model_validate(data)
    except ValidationError as err:
        first = err.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        what = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            what = "this server does not know the field: leave it out"
        raise ApiError(400, f"{where}: {what}"[:500], code="invalid_value", param=where[:200]) from None
