"""An answer by an assistant of AutoGen."""

import asyncio
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

INFO = {"vision": False, "function_calling": True, "json_output": True, "family": "unknown", "structured_output": True}
client = OpenAIChatCompletionClient(
    model="recall", base_url=sys.argv[1], api_key="none", model_info=INFO, max_tokens=24, temperature=0.0
)
agent = AssistantAgent("reader", client, system_message=None)
print(asyncio.run(agent.run(task=sys.stdin.read())).messages[-1].content)
