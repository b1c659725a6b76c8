"""An answer by an agent of Pydantic AI."""

import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel("recall", provider=OpenAIProvider(base_url=sys.argv[1], api_key="none"))
agent = Agent(model, model_settings={"max_tokens": 24, "temperature": 0.0})
print(agent.run_sync(sys.stdin.read()).output)
