"""An answer by an agent of OpenAI's Agents SDK, with its model for chat completions."""

import sys

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)
model = OpenAIChatCompletionsModel("recall", AsyncOpenAI(base_url=sys.argv[1], api_key="none"))
agent = Agent("reader", model=model, model_settings=ModelSettings(max_tokens=24, temperature=0.0))
print(Runner.run_sync(agent, sys.stdin.read()).final_output)
