"""An answer by an agent of Agno."""

import sys

from agno.agent import Agent
from agno.models.openai.like import OpenAILike

model = OpenAILike("recall", base_url=sys.argv[1], api_key="none", max_tokens=24, temperature=0.0)
print(Agent(model=model, telemetry=False).run(sys.stdin.read()).content)
