"""What the official clients of Anthropic and OpenAI parse of an answer that calls a tool, as one line of JSON."""

import json
import sys
from typing import Any

import anthropic
import openai
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

URL = sys.argv[1]
HELLO: Any = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}


def kinds(events: list[str]) -> list[str]:
    return [event for i, event in enumerate(events) if i == 0 or events[i - 1] != event]


def of_anthropic() -> dict[str, Any]:
    client = anthropic.Anthropic(base_url=URL, api_key="none")
    asked: Any = {
        "model": "any",
        "max_tokens": 1000,
        "messages": HELLO,
        "tools": [{"name": "Bash", "input_schema": SCHEMA}],
    }
    known, events = TypeAdapter(anthropic.types.RawMessageStreamEvent), []
    for event in client.messages.create(**asked, stream=True):
        if event.type != "ping":
            known.validate_python(event.model_dump())
        events.append(event.type)
    with client.messages.stream(**asked) as stream:
        message = stream.get_final_message()
    whole = client.messages.create(**asked)
    anthropic.types.Message.model_validate(whole.model_dump())
    errors = []
    for wrong in ({"messages": [{"role": "wizard", "content": "x"}]}, {"stop_sequences": ["x" * 300]}):
        try:
            client.messages.create(**{**asked, **wrong})
        except anthropic.BadRequestError as err:
            errors.append(err.body["error"]["type"])  # type: ignore[index,call-overload]
    return {
        "version": anthropic.__version__,
        "events": kinds(events),
        "blocks": [block.type for block in message.content],
        "input": message.content[-1].input,  # type: ignore[union-attr]
        "whole": [whole.content[-1].input, whole.stop_reason],  # type: ignore[union-attr]
        "counted": client.messages.count_tokens(model="any", messages=HELLO).input_tokens,
        "errors": errors,
    }


def of_openai() -> dict[str, Any]:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
    tools: Any = [{"type": "function", "name": "Bash", "parameters": SCHEMA, "strict": False}]
    known, events = TypeAdapter(ResponseStreamEvent), []
    for event in client.responses.create(model="any", input="hello", tools=tools, stream=True):
        known.validate_python(event.model_dump())
        events.append(event.type)
    with client.responses.stream(model="any", input="hello", tools=tools) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_response()
    Response.model_validate(streamed.model_dump())
    first = client.responses.create(model="any", input="hello " * 60)
    second = client.responses.create(model="any", input="and?", previous_response_id=first.id)
    usage = second.usage
    assert usage is not None
    try:
        client.responses.create(model="any", input="x", previous_response_id="resp_0")
    except openai.BadRequestError as err:
        refused = err.code
    return {
        "version": openai.__version__,
        "events": kinds(events),
        "items": [item.type for item in streamed.output],
        "input": json.loads(streamed.output[-1].arguments),  # type: ignore[union-attr]
        "read": usage.input_tokens - usage.input_tokens_details.cached_tokens,
        "refused": refused,
    }


print(json.dumps({"anthropic": of_anthropic(), "openai": of_openai()}))
