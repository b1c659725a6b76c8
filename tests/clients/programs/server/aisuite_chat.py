"""An answer by aisuite."""

import sys

import aisuite

client = aisuite.Client({"openai": {"base_url": sys.argv[1], "api_key": "none"}})
messages = [{"role": "user", "content": sys.stdin.read()}]
answer = client.chat.completions.create("openai:recall", messages=messages, max_tokens=24, temperature=0.0)
print(answer.choices[0].message.content)
