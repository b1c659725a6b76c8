"""A streamed answer from a server, asked by the client of OpenAI."""

import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="none")
messages = [{"role": "user", "content": sys.stdin.read()}]
stream = client.chat.completions.create(model="any", messages=messages, max_tokens=24, temperature=0.0, stream=True)
print("".join(piece.choices[0].delta.content or "" for piece in stream if piece.choices))
