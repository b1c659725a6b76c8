"""Schemas of requests. Unknown fields are ignored, and the answer names them; comments mark fields without effect.

A wrong list has one error, of its first wrong element: millions of errors would take more than the list.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    Strict,
    ValidationError,
    create_model,
    model_validator,
)

from .. import notation
from ..sampling import KNOWN, MAX_BREAKERS, Samplers, check_breakers, read_order
from ..settings import Setting, settings
from . import fields
from .errors import ApiError, invalid

MAX_ANSWERS = 16
"""In one request."""

MAX_STOPS = 16
MAX_STOP = 256
MAX_BIAS, MAX_BIASED = 1024, 64
MAX_MESSAGES = 1 << 14

MAX_PARTS = 1024
"""Texts of a prompt of texts and tokens: each is tokenised by itself."""

SAMPLERS = settings(Samplers)

LATE = "<system-reminder>\n{}\n</system-reminder>"
"""How a system message in the middle of a conversation is told. At the front it would change the prompt's beginning in
every turn, and all that follows would be read again. In the middle many templates refuse it.
"""


def _all(value: list[Any], kind: type, what: str) -> list[Any]:
    if set(map(type, value)) <= {kind}:
        return value
    at = next(i for i, one in enumerate(value) if type(one) is not kind)
    raise ValueError(f"element {at} is {named(value[at])}, and must be {what}")


def named(value: Any) -> str:
    """Write a value of JSON in words."""
    names = {str: "the text", int: "the integer", float: "the number", list: "a list", dict: "an object"}
    name, many = names.get(type(value), ""), isinstance(value, list | dict)
    return name if many else f"{name} {json.dumps(value[:40] if isinstance(value, str) else value)[:60]}".strip()


def _whole(value: Any) -> Any:
    """Read an integer that a client without integers has written: 3.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _few(value: Any, limit: int) -> Any:
    if isinstance(value, list | dict) and len(value) > limit:
        raise ValueError(f"it has {len(value)} elements, and {limit} is the most: send fewer")
    return value


def _stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise ValueError(f"it is {named(value)}, and must be a text or a list of texts")
    for stop in _all(_few(stops, MAX_STOPS), str, "a text"):
        if len(stop) > MAX_STOP:
            raise ValueError(f"a text of {len(stop)} characters, and {MAX_STOP} is the most: shorten it")
    return tuple(stops)


def _bias(value: Any) -> dict[str, float]:
    """Read `{"token": bias}`, or llama-server's `[[token, bias], ...]`, where false forbids a token or a text's."""
    _few(value, MAX_BIAS)
    if isinstance(value, list):
        if any(len(pair) != 2 or type(pair[0]) not in (int, str) for pair in _all(value, list, "[token, bias]")):
            raise ValueError("each element must be [token, bias], and the token an integer or a text")
        value = {str(token): -100.0 if bias is False else bias for token, bias in value}
    if not isinstance(value, dict):
        raise ValueError(f"it is {named(value)}, and must be an object")
    for token, bias in value.items():
        if len(token) > MAX_BIASED:
            raise ValueError(f"a text of {len(token)} characters, and {MAX_BIASED} is the most: shorten it")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            shown = bias if type(bias) in (int, float) else named(bias)
            raise ValueError(f"{token[:20]!r} has {str(shown)[:20]}, and must have a number from -100 to 100")
    return value


def _tokens(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise ValueError(f"it is {named(value)}, and must be a list of tokens")
    return _all(value, int, "a token")


def _prompts(value: Any, limit: int = MAX_ANSWERS) -> list[Prompt]:
    """Read the prompts of a request. A list with a token in it is one prompt, another list one of each element."""
    if isinstance(value, list) and value and int not in map(type, value):
        return [_prompt(one, f"element {i}") for i, one in enumerate(_few(value, limit))]
    return [_prompt(value, "it")]


def _prompt(value: Any, where: str) -> Prompt:
    """Read a text, tokens, texts and tokens in turn, or llama-server's object of a text and its images."""
    if isinstance(value, dict):
        if value.get("multimodal_data"):
            raise ValueError(f"{where} has multimodal_data, which only messages can have: send a chat")
        if "prompt_string" in value:
            value = value["prompt_string"]
        elif isinstance(value := value.get("content"), str):
            raise ValueError(f"{where} has a content that is a text: send the text alone")
        if isinstance(value, list):
            if any(part.get("type") != "text" for part in _all(value, dict, "an object")):
                raise ValueError(f"{where} has parts that are no text, which only messages can have: send a chat")
            value = "".join(part["text"] for part in value if isinstance(part.get("text"), str))
    if isinstance(value, list):
        kinds = set(map(type, value))
        if str in kinds and (texts := sum(isinstance(one, str) for one in value)) > MAX_PARTS:
            raise ValueError(f"{where} has {texts} texts, and {MAX_PARTS} is the most: join them")
        if kinds <= {int, str}:
            return value
        at = next(i for i, one in enumerate(value) if type(one) not in (int, str))
        raise ValueError(f"{where}: element {at} is {named(value[at])}, and must be a token or a text")
    if not isinstance(value, str):
        raise ValueError(f"{where} is {named(value)}, and must be a text or a list")
    return value


def text_of_content(content: str | list[dict[str, Any]] | None) -> str:
    """Return the text of a message, as far as it has one."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = (part.get("text", part.get("refusal")) for part in content)
    return "\n".join(text for text in texts if isinstance(text, str) and text)


def _in_place(messages: list[Message]) -> list[Message]:
    """Make user's turns of system messages that come late."""
    late = False
    for message in messages:
        if message.role not in ("system", "developer"):
            late = True
        elif late:
            message.role, message.content = "user", LATE.format(text_of_content(message.content))
    return messages


Whole = Annotated[int, BeforeValidator(_whole)]
Pin = Annotated[tuple[Whole, Whole], Strict(False)]
"""A list in JSON."""
Tokens = Annotated[list[int], PlainValidator(_tokens)]
Prompt = str | list[int | str]
Prompts = Annotated[list[Prompt], PlainValidator(_prompts)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Messages = Annotated[
    "list[Message]",
    Field(fail_fast=True),
    Field(min_length=1),
    BeforeValidator(lambda value: _few(value, MAX_MESSAGES)),
    AfterValidator(_in_place),
]
Tools = Annotated["list[Tool]", Field(fail_fast=True), Field(max_length=128)]


def _without_null(data: Any) -> Any:
    return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class _Known(BaseModel):
    model_config = ConfigDict(extra="allow", allow_inf_nan=False, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, data: Any) -> Any:
        """Leave out null, which clients write for what they do not set."""
        return _without_null(data)


class _Asked(_Known):
    """What every request has: clients name a model, whichever is served."""

    model: str | None = None


class FormRequest(_Asked):
    """What comes as a form with files, and not as JSON."""


class PoolFields(_Known):
    """`kvflash` of a request: what only this server knows."""

    cache_prompt: bool = True
    cache_salt: str = Field("", max_length=256)
    conversation: str | None = Field(None, max_length=128)
    priority: Whole = Field(0, ge=-10, le=10)
    pins: Annotated[list[Pin], Field(fail_fast=True)] = Field(default_factory=list, max_length=64)
    reading: Literal["exact", "pool", "preview"] | None = None
    answer: Literal["pool", "exact", "lossless", "auto"] | None = None
    drafts: bool = True
    overflow: Literal["error", "roll"] | None = None
    report: Literal["none", "summary"] = "none"

    def overflowing(self, *, roll: bool) -> PoolFields:
        """Return these fields with what another interface says of chats that outgrow the context."""
        return self.model_copy(update={"overflow": "roll" if roll else "error"})


class StreamOptions(_Known):
    include_usage: bool = False
    include_obfuscation: bool = False


class JsonSchema(_Known):
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Known):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    json_object: dict[str, Any] | bool | None = Field(None, alias="schema")


def _breakers(value: Any) -> tuple[str, ...]:
    """Read a text, a list as text, or a list; none of them asks for no breaker."""
    texts = _few([value] if isinstance(value, str) else value, MAX_BREAKERS)
    if not isinstance(texts, list):
        raise ValueError("it must be a list of texts")
    check_breakers(tuple(_all(texts, str, "a text")))
    return tuple(texts) or ("none",)


def _order(value: Any) -> tuple[str, ...]:
    """Read names in a list or between semicolons, or llama-server's letters."""
    if isinstance(value, list):
        value = ";".join(_all(_few(value, len(KNOWN)), str, "a text"))
    if not isinstance(value, str) or len(value) > MAX_STOP:
        raise ValueError("it must be a list of names of samplers")
    return read_order(value)


_ALSO = {"typical_p": "typ_p", "repeat_penalty": "repetition_penalty", "mirostat": "mirostat_mode"}
"""Names that other servers give samplers."""

_READ = {"dry_sequence_breakers": _breakers, "samplers": _order}


def _sampler(name: str, one: Setting) -> tuple[Any, Any]:
    """Make a field of `Samplers`, with its bounds. Unset, it has the server's usual value."""
    if name in _READ:
        return Annotated[tuple[str, ...] | None, PlainValidator(_READ[name])], None
    above, least = (one.least, None) if one.above else (None, one.least)
    names = AliasChoices(name, *filter(None, [_ALSO.get(name)]))
    kind = Whole if one.kind in (int, notation.tokens) else one.kind
    return kind | None, Field(None, gt=above, ge=least, le=one.most, validation_alias=names)


_FIELDS: Any = {name: _sampler(name, one) for name, one in SAMPLERS.items()}
_Samplers: Any = create_model("_Samplers", __base__=_Asked, **_FIELDS)


class _Sampled(_Samplers):  # type: ignore[misc]
    """What every request for an answer has. ASKS: the field that the model answers, for errors."""

    ASKS: ClassVar[str] = "prompt"
    stream: bool = False
    stream_options: StreamOptions | None = None
    seed: Whole | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(_stop)] = ()
    logit_bias: Annotated[dict[str, float] | None, PlainValidator(_bias)] = None
    n: Whole | None = Field(None, ge=1, le=MAX_ANSWERS)
    cache_prompt: bool | None = None
    ignore_eos: bool = False
    grammar: str | None = Field(None, max_length=256 << 10)
    json_schema: dict[str, Any] | None = Field(None, validation_alias=AliasChoices("json_schema", "guided_json"))
    response_format: ResponseFormat | None = None
    kvflash: PoolFields = PoolFields.model_construct()
    id_slot: Whole | None = None
    # known to other servers' clients, without effect here
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    timings_per_token: bool | None = None


class Message(BaseModel):
    """Other fields go to the template as they are."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Objects | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = None
    tool_calls: Objects | None = None

    @model_validator(mode="after")
    def _says(self) -> Message:
        """Check that the message says something. An answer may be a call, or reasoning, alone. Null content says
        nothing.
        """
        given = self.model_fields_set - {"role", "name"}
        if not (given if self.role == "assistant" else "content" in given):
            raise ValueError("content is missing: give it a text, or null")
        return self


class FunctionCalled(_Known):
    name: str


class ToolChoice(_Known):
    type: Literal["function"]
    function: FunctionCalled


class Function(_Known):
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Known):
    type: Literal["function"]
    function: Function


class TemplateRequest(_Asked):
    messages: Messages
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None


class ChatRequest(_Sampled, TemplateRequest):
    ASKS: ClassVar[str] = "messages"
    max_tokens: Whole = Field(
        -1, ge=-1, validation_alias=AliasChoices("max_completion_tokens", "max_tokens", "n_predict")
    )
    logprobs: bool | None = None
    top_logprobs: Whole | None = Field(None, ge=0, le=20)
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_format: Literal["auto", "deepseek", "none"] | None = None
    reasoning_effort: str | None = Field(None, max_length=32)
    continue_final_message: bool | Literal["content", "reasoning_content"] | None = None
    add_generation_prompt: bool | None = None
    verbosity: str | None = None


class CompletionRequest(_Sampled):
    prompt: Prompts
    max_tokens: Whole = Field(
        16, ge=-1, validation_alias=AliasChoices("max_completion_tokens", "n_predict", "max_tokens")
    )
    logprobs: Whole | None = Field(None, ge=0, le=20)
    echo: bool = False
    suffix: str | None = None
    best_of: Whole | None = None

    @model_validator(mode="before")
    @classmethod
    def _given(cls, data: Any) -> Any:
        """Turn null into no limit. A limit that is left out is 16 tokens."""
        given, names = _without_null(data), {"max_completion_tokens", "n_predict", "max_tokens"}
        if given is not data and names & data.keys() and not names & given.keys():
            given["max_tokens"] = -1
        return given


class _Raw(_Sampled):
    """What requests of llama-server's own endpoints have."""

    n_predict: Whole = Field(
        -1, ge=-1, validation_alias=AliasChoices("n_predict", "max_tokens", "max_completion_tokens")
    )
    n_probs: Whole = Field(0, ge=0, le=20)
    return_tokens: bool = False
    response_fields: Annotated[list[str], Field(fail_fast=True)] = Field(default_factory=list, max_length=64)


class RawRequest(_Raw):
    """llama-server's own `/completion`."""

    prompt: Prompts


class TranslatedRequest(_Asked):
    """What requests of other interfaces have in common, which become chats."""

    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    tools: Objects | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    kvflash: PoolFields = PoolFields.model_construct()
    service_tier: str | None = None  # without effect here


class ExtraFile(_Known):
    text: str
    filename: str = "tmp"


class InfillRequest(_Raw):
    """llama-server's `/infill`: what stands between two texts."""

    ASKS: ClassVar[str] = "input_prefix"
    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraFile], Field(fail_fast=True, max_length=1024)] = Field(default_factory=list)
    prompt: str = ""


class TokenizeRequest(_Asked):
    """The aliases are of programs that speak to vLLM."""

    content: str = Field(validation_alias=AliasChoices("content", "prompt"))
    add_special: bool = Field(False, validation_alias=AliasChoices("add_special", "add_special_tokens"))
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(_Asked):
    tokens: Tokens


_KINDS = {
    "int_type": "an integer", "float_type": "a number", "bool_type": "true or false", "string_type": "a text",
    "list_type": "a list", "tuple_type": "a list", "dict_type": "an object", "model_type": "an object",
}  # fmt: skip

_LENGTHS = {
    "too_short": "it has {} elements, and {} is the least: give it more",
    "too_long": "it has {} elements, and {} is the most: send fewer",
    "string_too_long": "a text of {} characters, and {} is the most: shorten it",
}


def parse(
    kind: type[Any], data: Any, *, strict: bool, names: Mapping[str, str] = MappingProxyType({})
) -> tuple[Any, list[str]]:
    """Parse a request of this kind. Return it and what it has that is ignored. ApiError names the field that is wrong.

    strict: a field that is not known is wrong. names: what the client calls fields.
    """
    if not isinstance(data, dict):
        raise ApiError(400, f"the body is {named(data)}, and must be a JSON object", code="invalid_json")
    try:
        asked = kind.model_validate(data)
    except ValidationError as err:
        where, what = _why(data, err.errors(include_url=False, include_input=False))
        raise _wrong(where, what, names) from None
    ignored = []
    for where, value in _unknown(asked, ""):
        if strict:
            raise _wrong(where, "this server does not know the field: leave it out", names)
        if (name := fields.told(where, value)) is not None:
            ignored.append(name)
    return asked, ignored


def _why(data: Any, errors: Sequence[Any]) -> tuple[str, str]:
    """Say where the first wrong field is wrong, and why. Of its possible kinds, the one that fits longest counts."""
    place: list[str] = []
    kinds: list[str] = []
    value = data
    for error in errors:
        if error["loc"][:1] != errors[0]["loc"][:1]:
            break
        inner, at, missing = [], data, error["type"] == "missing"  # or null
        for part in error["loc"][:-1] if missing else error["loc"]:  # names of kinds are among them
            if (part in at) if isinstance(at, dict) else isinstance(at, list) and part in range(len(at)):
                inner.append(str(part))
                at = at[part]
        kind = _KINDS.get(error["type"], error["msg"].partition("Input should be ")[2])
        if missing:
            return ".".join([*inner, str(error["loc"][-1])]), "it is missing"
        if error["type"] in _LENGTHS:
            told, limits = _LENGTHS[error["type"]], error["ctx"]
            return ".".join(inner), told.format(len(at), limits.get("max_length", limits.get("min_length")))
        if not kind:
            return ".".join(inner), error["msg"].removeprefix("Value error, ")
        if len(inner) > len(place) or not kinds:
            place, value, kinds = inner, at, []
        if len(inner) == len(place):
            kinds.append(kind)
    return ".".join(place), f"it is {named(value)}, and must be {' or '.join(dict.fromkeys(kinds))}"


def _unknown(asked: BaseModel, where: str) -> Iterator[tuple[str, Any]]:
    """Take out and return what a request and the objects in it have beside their fields."""
    extra = dict(asked.model_extra or {})
    (asked.model_extra or {}).clear()
    yield from ((f"{where}{name}", value) for name, value in extra.items())
    for name, field in type(asked).model_fields.items():
        value, inner = getattr(asked, name), f"{where}{field.alias or name}."
        if isinstance(value, BaseModel):
            yield from _unknown(value, inner)
        elif isinstance(value, list) and value and isinstance(value[0], _Known):
            for i, one in enumerate(value):
                yield from _unknown(one, f"{inner}{i}.")


def _wrong(where: str, what: str, names: Mapping[str, str]) -> ApiError:
    first, dot, rest = where.partition(".")
    where = f"{names.get(first, first)}{dot}{rest}"
    return invalid(where[:200], what[:300])
