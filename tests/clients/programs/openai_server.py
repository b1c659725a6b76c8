"""What the official client does with a server: every kind of request it has for us. Prints what it found, as JSON."""

import asyncio
import json
import sys

import openai
from pydantic import BaseModel

URL = sys.argv[1]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
HELLO = [{"role": "user", "content": "Hello there"}]


class Trip(BaseModel):
    city: str
    days: int


def plain(client: openai.OpenAI) -> dict:
    found = {"models": [model.id for model in client.models.list()]}
    model = found["models"][0]
    answer = client.chat.completions.create(model=model, messages=HELLO, temperature=0, max_tokens=12)
    found["chat"] = [answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage.total_tokens]
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=HELLO,
            temperature=0,
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    found["stream"] = [text, chunks[-1].usage.total_tokens]
    told = client.chat.completions.create(
        model=model, messages=HELLO, temperature=0, max_tokens=3, logprobs=True, top_logprobs=4
    )
    content = told.choices[0].logprobs.content
    found["logprobs"] = [len(content), len(content[0].top_logprobs), content[0].logprob <= 0]
    forced = {"type": "function", "function": {"name": "weather"}}
    call = client.chat.completions.create(model=model, messages=HELLO, tools=[TOOL], tool_choice=forced, max_tokens=80)
    found["tool"] = sorted(json.loads(call.choices[0].message.tool_calls[0].function.arguments))
    trip = client.chat.completions.parse(model=model, messages=HELLO, response_format=Trip, max_tokens=300, seed=1)
    found["parsed"] = type(trip.choices[0].message.parsed).__name__
    several = client.chat.completions.create(model=model, messages=HELLO, max_tokens=6, n=3, seed=1)
    found["several"] = [[one.index for one in several.choices], several.usage.completion_tokens]
    done = client.completions.create(model=model, prompt="Once upon a time", max_tokens=5, temperature=0, logprobs=1)
    found["completion"] = [done.usage.completion_tokens, len(done.choices[0].logprobs.tokens)]
    return found


def errors(client: openai.OpenAI) -> list[str]:
    found = []
    for more in ({"temperature": -1}, {"n": 99}, {"messages": [{"role": "user", "content": "x " * 20000}]}):
        try:
            client.chat.completions.create(**{"model": "m", "messages": HELLO, **more})
        except openai.APIStatusError as err:
            found.append(str(err.code))
    try:
        client.embeddings.create(model="m", input="x")
    except openai.InternalServerError as err:
        found.append(f"{err.status_code} {err.code}")
    try:
        client.with_options(timeout=0.05).chat.completions.create(
            model="m", messages=HELLO, max_tokens=4000, extra_body={"ignore_eos": True}
        )
    except openai.APITimeoutError:
        found.append("timeout")
    return found


async def many(count: int) -> list[int]:
    """Streams at once. Those that find no room are retried by the client itself, after `Retry-After`."""
    client = openai.AsyncOpenAI(base_url=URL, api_key="x", max_retries=20)

    async def one(number: int) -> int:
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": f"Say {number}"}], max_tokens=6, stream=True
        )
        return len([chunk async for chunk in stream])

    counts = await asyncio.gather(*(one(number) for number in range(count)))
    await client.close()
    return counts


if __name__ == "__main__":
    patient = openai.OpenAI(base_url=URL, api_key="x")
    strict = openai.OpenAI(base_url=URL, api_key="x", max_retries=0)
    result = {"version": openai.__version__, **plain(patient), "errors": errors(strict)}
    result["streams"] = sum(count > 1 for count in asyncio.run(many(64)))
    print(json.dumps(result))
