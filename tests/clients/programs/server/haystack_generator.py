"""An answer by Haystack's generator for chats."""

import sys

from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.utils import Secret

generator = OpenAIChatGenerator(
    Secret.from_token("none"),
    "recall",
    api_base_url=sys.argv[1],
    generation_kwargs={"max_tokens": 24, "temperature": 0},
)
print(generator.run([ChatMessage.from_user(sys.stdin.read())])["replies"][0].text)
