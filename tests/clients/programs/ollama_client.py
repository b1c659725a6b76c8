"""What Ollama's own client parses, as one line of JSON."""

import json
import sys
from typing import Any

import ollama

client = ollama.Client(host=sys.argv[1])
HELLO: Any = [{"role": "user", "content": "Hello"}]
OPTIONS: Any = {"num_predict": 5, "temperature": 0.0, "seed": 1}


def zone(city: str) -> str:
    """Tell the time zone of a city.

    Args:
        city: its name

    """
    return city


def found() -> dict[str, Any]:
    (listed,) = client.list().models
    (running,) = client.ps().models
    shown = client.show(listed.model or "")
    chat = client.chat("any", HELLO, options=OPTIONS, tools=[zone], think=False, keep_alive="5m")
    pieces = list(client.chat("any", HELLO, options=OPTIONS, tools=[zone], stream=True))
    prompts = list(client.generate("any", "Hello", system="Be short.", options=OPTIONS, stream=True))
    raw = client.generate("any", "One, two,", raw=True, options=OPTIONS)
    form = client.chat("any", HELLO, options={"num_predict": 200}, format={"enum": ["yes", "no"]})
    try:
        client.chat("any", HELLO, options={"temperature": -1.0})
        wrong = ""
    except ollama.ResponseError as err:
        wrong = f"{err.status_code} {err.error}"
    return {
        "models": [listed.model, running.context_length, (shown.modelinfo or {})["general.architecture"]],
        "capabilities": shown.capabilities,
        "chat": [chat.message.content, chat.done_reason, chat.eval_count],
        "durations": bool(chat.total_duration and chat.prompt_eval_count),
        "stream": ["".join(piece.message.content or "" for piece in pieces), pieces[-1].done_reason],
        "generate": [len("".join(one.response for one in prompts)) > 0, prompts[-1].done],
        "raw": [raw.done_reason, raw.eval_count],
        "format": form.message.content,
        "wrong": wrong,
    }


print(json.dumps(found()))
