"""A streamed answer by an agent of Strands."""

import sys

from strands import Agent
from strands.models.openai import OpenAIModel

model = OpenAIModel(
    client_args={"base_url": sys.argv[1], "api_key": "none"}, model_id="recall",
    params={"max_tokens": 24, "temperature": 0.0},
)  # fmt: skip
print(Agent(model=model, callback_handler=None)(sys.stdin.read()))
