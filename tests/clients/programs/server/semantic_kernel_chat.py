"""An answer by Semantic Kernel."""

import asyncio
import sys

from openai import AsyncOpenAI
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory

service = OpenAIChatCompletion("recall", async_client=AsyncOpenAI(base_url=sys.argv[1], api_key="none"))
history = ChatHistory()
history.add_user_message(sys.stdin.read())
settings = OpenAIChatPromptExecutionSettings(max_tokens=24, temperature=0.0)
print(asyncio.run(service.get_chat_message_content(history, settings)))
