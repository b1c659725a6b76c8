"""An answer by Mozilla's any-llm."""

import sys

from any_llm import completion

messages = [{"role": "user", "content": sys.stdin.read()}]
answer = completion(
    "recall", messages, provider="openai", api_base=sys.argv[1], api_key="none", max_tokens=24, temperature=0.0
)
print(answer.choices[0].message.content)
