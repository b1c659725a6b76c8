"""`/openapi.json`: describes every endpoint as OpenAPI 3.1 does, made of the routes and of the schemas of requests."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import cache
from typing import Any, TypeAlias, get_type_hints

from pydantic import AliasChoices, BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from .. import __version__
from .errors import ANTHROPICS_PATHS, OLLAMAS_PATH
from .forms import MEDIA_TYPE
from .guard import OPEN_PATHS
from .schema import FormRequest
from .settings import ServerSettings

Endpoint: TypeAlias = Callable[..., Awaitable[Response]]
"""Called with the front and the HTTP request, and with its parsed body where there is a parameter `asked`."""

Described: TypeAlias = tuple[str, str, Endpoint]
"""Method, path and endpoint of a route."""

QUERIES: Mapping[str, tuple[str, ...]] = {
    "/slots": ("fail_on_no_slot",),
    "/slots/{id}": ("action",),
    "/kvflash/words": ("conversation", "chunk"),
}
"""What stands behind the question mark, by path."""

OBJECTS: Mapping[str, Mapping[str, str]] = {
    "/slots/{id}": {"filename": "string"},
    "/kvflash/markdown": {"text": "string"},
    "/kvflash/conversations/{id}/{action}": {"lo": "integer", "hi": "integer"},
    "/models/load": {"model": "string"},
    "/models/unload": {"model": "string"},
}
"""Fields of bodies that have no class, with their types, by path."""

FILES: Mapping[str, str] = {"/kvflash/pdf": "application/pdf"}
"""Media types of bodies that are a file, by path."""

STREAM = "text/event-stream"
KINDS: Mapping[str, str] = {
    "/": "text/html",
    "/metrics": "text/plain",
    "/kvflash/events": STREAM,
}
"""What an answer is, by path, where it is not JSON."""

_ERROR = {"message": "string", "type": "string", "param": "string", "code": "string"}

_NOT_OF_A_SCHEMA = {"ge": "minimum", "le": "maximum", "gt": "exclusiveMinimum", "lt": "exclusiveMaximum"}
"""What pydantic calls the bounds of a number that has a validator, and JSON schema's words for them."""


@cache
def takes(endpoint: Endpoint) -> type[BaseModel] | None:
    """Return the class of the requests that an endpoint takes; None for one without a parsed body."""
    return get_type_hints(endpoint).get("asked")


def takes_form(endpoint: Endpoint) -> bool:
    """Tell whether an endpoint takes a form, and not JSON."""
    return issubclass(takes(endpoint) or object, FormRequest)


def document(routes: Iterable[Described], settings: ServerSettings) -> dict[str, Any]:
    """Describe these routes. A path of all routes has one entry, and each of its methods one operation."""
    routes = list(routes)
    kinds = sorted({kind for *_, one in routes if (kind := takes(one)) is not None}, key=lambda kind: kind.__name__)
    _, made = models_json_schema([(kind, "validation") for kind in kinds], ref_template="#/components/schemas/{model}")
    schemas = _plain(made["$defs"])
    for kind in kinds:
        _with_aliases(schemas[kind.__name__], kind)
    for name, shape in ("Error", _ERROR), ("AnthropicsError", {"type": "string", "message": "string"}):
        schemas[name] = _object({"error": _object(_types(shape))})
    schemas["OllamasError"] = _object(_types({"error": "string"}))
    paths: dict[str, dict[str, Any]] = {}
    for method, path, endpoint in routes:
        plain = re.sub(r"\{(\w+):\w+\}", r"{\1}", path)
        paths.setdefault(plain, {})[method.lower()] = _operation(plain, endpoint, settings)
    keys = {"bearer": {"type": "http", "scheme": "bearer"}, "x-api-key": {"type": "apiKey", "in": "header"}}
    keys["x-api-key"]["name"] = "x-api-key"
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvflash_ggml", "version": __version__},
        "servers": [{"url": settings.api_prefix or "/"}],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": keys},
        "security": [{name: []} for name in keys] if settings.keys else [],
    }


def _operation(path: str, endpoint: Endpoint, settings: ServerSettings) -> dict[str, Any]:
    kind, said = takes(endpoint), (inspect.getdoc(endpoint) or "").partition("\n\n")
    told, what = KINDS.get(path, "application/json"), dict[str, Any](schema={})
    streams = kind is not None and "stream" in kind.model_fields
    stream = "application/x-ndjson" if path.startswith(OLLAMAS_PATH) else STREAM
    made: dict[str, Any] = {"summary": " ".join(said[0].split())}
    if said[2]:
        made["description"] = " ".join(said[2].split())
    asked = [_parameter(name, "path", required=True) for name in re.findall(r"\{(\w+)\}", path)]
    asked += [_parameter(name, "query", required=False) for name in QUERIES.get(path, ())]
    if asked:
        made["parameters"] = asked
    if kind is not None:
        media = MEDIA_TYPE if takes_form(endpoint) else "application/json"
        schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
        made["requestBody"] = {"required": True, "content": {media: {"schema": schema}}}
    elif path in FILES:
        made["requestBody"] = {"required": True, "content": {FILES[path]: {"schema": {}}}}
    elif path in OBJECTS:
        made["requestBody"] = {"content": {"application/json": {"schema": _object(_types(OBJECTS[path]))}}}
    error = "AnthropicsError" if path.startswith(ANTHROPICS_PATHS) else "Error"
    error = "OllamasError" if path.startswith(OLLAMAS_PATH) else error
    failed = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}
    made["responses"] = {
        "200": {"description": "The answer.", "content": {told: what, **({stream: what} if streams else {})}},
        "default": {"description": "An error: the status says of which kind.", "content": failed},
    }
    if settings.keys and (path in OPEN_PATHS or (path == "/metrics" and settings.public_metrics)):
        made["security"] = []
    return made


def _parameter(name: str, where: str, *, required: bool) -> dict[str, Any]:
    return {"name": name, "in": where, "required": required, "schema": {"type": "string"}}


def _types(fields: Mapping[str, str]) -> dict[str, Any]:
    return {name: {"type": kind} for name, kind in fields.items()}


def _object(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": dict(fields)}


def _plain(value: Any) -> Any:
    """Return schemas with JSON schema's words alone, and without titles, which repeat names."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        _NOT_OF_A_SCHEMA.get(name, name): _plain(one)
        for name, one in value.items()
        if not (name == "title" and isinstance(one, str))
    }


def _with_aliases(schema: dict[str, Any], kind: type[BaseModel]) -> None:
    """Add the other names of fields that have several. None of them alone is required then."""
    for field in kind.model_fields.values():
        if isinstance(names := field.validation_alias, AliasChoices):
            first, *others = map(str, names.choices)
            schema["properties"] |= dict.fromkeys(others, schema["properties"][first])
            if first in schema.get("required", ()):
                schema["required"] = [name for name in schema["required"] if name != first]
                schema["anyOf"] = [{"required": [name]} for name in (first, *others)]
