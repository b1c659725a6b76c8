"""An answer by an agent of Microsoft's Agent Framework."""

import asyncio
import sys

from agent_framework.openai import OpenAIChatCompletionClient

client = OpenAIChatCompletionClient(model="recall", base_url=sys.argv[1], api_key="none")
agent = client.as_agent(name="reader", default_options={"max_tokens": 24, "temperature": 0.0})
print(asyncio.run(agent.run(sys.stdin.read())).text)
