"""A streamed answer by LiteLLM, which knows the server as any OpenAI one."""

import sys

import litellm

messages = [{"role": "user", "content": sys.stdin.read()}]
stream = litellm.completion(
    "openai/recall",
    messages=messages,
    api_base=sys.argv[1],
    api_key="none",
    max_tokens=24,
    temperature=0.0,
    stream=True,
)
print("".join(piece.choices[0].delta.content or "" for piece in stream))
