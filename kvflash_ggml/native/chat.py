"""llama.cpp's chat templates and the parsers of their answers, in libkvf_chat. No call holds the interpreter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError, HostMemoryError, brief
from ._kvf import ffi, lib


def open_template(source: str, *, bos: str, eos: str) -> tuple[Any, dict[str, bool]]:
    """Read a chat template. Return it, and what it can do by llama.cpp's names. Raise ConfigError if it has errors."""
    if not source:
        raise ConfigError("it is empty")  # the library would take that of a model, and ends the process without one
    made, caps = ffi.new("kvf_chat **"), ffi.new("kvf_chat_text *")
    data = source.encode("utf-8", "replace")
    _check(lib.kvf_chat_open(data, len(data), _text(bos), _text(eos), made, caps))
    return ffi.gc(made[0], lib.kvf_chat_close), _taken(caps)


def render(template: Any, request: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Render a chat as `kvf_chat.h` has it, and make the parser of its answers. ConfigError says what is wrong."""
    rendered, parser, data = ffi.new("kvf_chat_text *"), ffi.new("kvf_chat_parser **"), json.dumps(request).encode()
    _check(lib.kvf_chat_render(template, data, len(data), rendered, parser))
    return _taken(rendered), ffi.gc(parser[0], lib.kvf_chat_parser_close)


def plain(source: str, variables: Mapping[str, Any]) -> str:
    """Render a template with these variables as Jinja does, within bounds. ConfigError says what is wrong.

    variables: values of JSON, and mappings. AttributeError, TypeError or ValueError for others.
    """
    rendered, data = ffi.new("kvf_chat_text *"), source.encode("utf-8", "replace")
    given = json.dumps(variables, allow_nan=False, default=lambda value: dict(value.items())).encode()
    status = lib.kvf_chat_plain(data, len(data), given, len(given), rendered)
    if status in (lib.KVF_CHAT_STATUS_SOURCE, lib.KVF_CHAT_STATUS_TEMPLATE):
        why = brief(_reason().rpartition("\nError: ")[2])  # behind where it happened; a template chooses its words
        if status == lib.KVF_CHAT_STATUS_SOURCE:
            raise ConfigError(f"the chat template cannot be read: {why}: give a chat_format, as 'chatml'")
        raise ConfigError(f"the chat template refuses these messages: {why}: change them, or give another chat_format")
    _check(status)
    try:
        return bytes(ffi.buffer(rendered.data, rendered.size)).decode("utf-8", "replace")
    finally:
        lib.kvf_chat_free(rendered[0])


def schema_grammar(schema: Mapping[str, Any]) -> str:
    """Return the grammar of a schema that `chat.rewriting.held` has rewritten. ConfigError."""
    grammar, data = ffi.new("kvf_chat_text *"), json.dumps(schema).encode()
    _check(lib.kvf_chat_schema(data, len(data), grammar))
    try:
        return bytes(ffi.buffer(grammar.data, grammar.size)).decode()
    finally:
        lib.kvf_chat_free(grammar[0])


def parse(parser: Any, text: str) -> dict[str, Any]:
    """Parse the beginning of an answer into what `kvf_chat.h` describes."""
    said, data = ffi.new("kvf_chat_text *"), text.encode("utf-8", "replace")
    _check(lib.kvf_chat_parse(parser, data, len(data), said))
    found: dict[str, Any] = _taken(said)
    return found


def sampler(vocab: int, request: Mapping[str, Any]) -> int:
    """Return the address of a llama_sampler that holds an answer to a grammar. vocab: a llama_vocab's.

    ConfigError with llama.cpp's reason for a grammar that cannot be used.
    """
    data = json.dumps(request).encode()
    made = int(ffi.cast("uintptr_t", lib.kvf_chat_sampler(ffi.cast("void *", vocab), data, len(data))))
    if not made:
        raise ConfigError(_reason())
    return made


def _text(value: str) -> bytes:
    return value.encode("utf-8", "replace").replace(b"\0", b"")


def _taken(text: Any) -> Any:
    try:
        return json.loads(ffi.buffer(text.data, text.size)[:])
    finally:
        lib.kvf_chat_free(text[0])


def _check(status: int) -> None:
    if status != lib.KVF_CHAT_STATUS_SUCCESS:
        raise (HostMemoryError if status == lib.KVF_CHAT_STATUS_MEMORY else ConfigError)(_reason())


def _reason() -> str:
    return str(ffi.string(lib.kvf_chat_last_error()).decode("utf-8", "replace"))
