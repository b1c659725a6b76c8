"""An answer by the model class of smolagents."""

import sys

from smolagents import ChatMessage, OpenAIServerModel

model = OpenAIServerModel("recall", api_base=sys.argv[1], api_key="none", max_tokens=24, temperature=0.0)
message = ChatMessage(role="user", content=[{"type": "text", "text": sys.stdin.read()}])
print(model.generate([message]).content)
