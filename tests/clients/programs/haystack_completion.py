"""An answer by Haystack's generator for llama-cpp-python."""

import sys

from haystack.dataclasses import ChatMessage
from haystack_integrations.components.generators.llama_cpp import LlamaCppChatGenerator

model, prompt = sys.argv[1], sys.stdin.read()
generator = LlamaCppChatGenerator(model, n_ctx=8192, generation_kwargs={"max_tokens": 24, "temperature": 0.0})
generator.warm_up()
print(generator.run([ChatMessage.from_user(prompt)])["replies"][0].text)
