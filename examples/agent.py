"""An agent's loop: the model calls functions until it has an answer. Each turn reads only the new result.

python agent.py http://127.0.0.1:8080/v1 "What time is it in Rome?"
"""

import datetime
import json
import sys

from openai import OpenAI

MOST_TURNS = 8


def clock(zone: str) -> str:
    """The time, as far as this example knows zones."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return f"{now:%H:%M} UTC ({zone})"


def add(a: float, b: float) -> str:
    return str(a + b)


FUNCTIONS = {"clock": clock, "add": add}
TEXT, NUMBER = {"type": "string", "maxLength": 40}, {"type": "number"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": what,
            "parameters": {"type": "object", "properties": properties, "required": list(properties)},
        },
    }
    for name, what, properties in (
        ("clock", "The time in a zone.", {"zone": TEXT}),
        ("add", "The sum of two numbers.", {"a": NUMBER, "b": NUMBER}),
    )
]


def call(name: str, arguments: str) -> str:
    """What a function returns, or what is wrong with the call: the model is told either."""
    try:
        return FUNCTIONS[name](**json.loads(arguments))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error}"


def main() -> None:
    client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1", api_key="none")
    question = sys.argv[2] if len(sys.argv) > 2 else "What time is it in Rome?"
    messages = [{"role": "system", "content": "Use the functions."}, {"role": "user", "content": question}]
    for turn in range(MOST_TURNS):
        answer = client.chat.completions.create(
            model="any",
            messages=messages,
            tools=TOOLS,
            tool_choice="required" if turn == 0 else "auto",
            max_tokens=200,
            extra_body={"kvflash": {"conversation": "agent"}},
        )
        message, usage = answer.choices[0].message, answer.usage
        print(f"[turn {turn}: {usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens} tokens read]")
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            print(message.content)
            return
        for made in message.tool_calls:
            result = call(made.function.name, made.function.arguments)
            print(f"{made.function.name}({made.function.arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": made.id, "content": result})


if __name__ == "__main__":
    main()
